"""`POST /v1/messages`: conversations in the form of Anthropic's API, translated to those of chat completions.

Source of the form and of the events: the public documentation of the Messages API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...engine.request import Ended, Event, TokenMade
from ...tools.calls import NO_TOOLS, ToolsOfRequest, json_text, parsed
from ..answer import Answer, Collected, new_id, sent_event
from ..errors import RequestError, bad_field, shown
from ..fields import MAX_STOP_CHARACTERS, MAX_STOPS, Asked, Fields, read_sampling
from ..service import Service
from .chat import chat_requests, chat_tokens, message_text, read_message
from .response_format import answer_masks
from .tool_fields import named_choice, new_call_id, read_function, read_tools

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ROLES = ("user", "assistant")


def message_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageForm:
    """The form of a message. Thinking is a block of its own."""

    def __init__(
        self, service: Service, prompt_tokens: int, starts_thinking: bool, tools: ToolsOfRequest = NO_TOOLS
    ) -> None:
        self._answer, self._splitter = Collected(), service.chat_form.parts(starts_thinking, tools)
        self._service = service
        self._model, self._id, self._prompt_tokens = service.options.name, new_id("msg"), prompt_tokens
        self._blocks: list[dict[str, Any]] = []
        self._calls = 0

    def begin(self) -> Iterable[bytes]:
        message = {**self._message([], None), "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0}}
        yield sent_event({"type": "message_start", "message": message}, "message_start")

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        self._answer.add(event)
        if isinstance(event, TokenMade):
            yield from self._deltas(self._splitter.push(event.text))
            yield from self._tool_blocks()
        elif isinstance(event, Ended):
            yield from self._deltas(self._splitter.flush())
            yield from self._tool_blocks()
            if not self._blocks:
                yield from self._deltas([(False, "")])
            yield self._event("content_block_stop", index=len(self._blocks) - 1)

    def finish(self) -> Iterable[bytes]:
        reason, stop = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield self._event("message_delta", delta=delta, usage=self._usage())
        yield self._event("message_stop")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return (sent_event(message_error(error), "error"),)

    def error_body(self, error: RequestError) -> dict[str, Any]:
        return message_error(error)

    def whole(self) -> dict[str, Any]:
        timings = {} if self._answer.ended is None else self._answer.ended.timings.to_plain()
        return {**self._message(self._blocks, self._stop_reason()), "timings": timings}

    def _message(self, content: list[dict[str, Any]], stop: tuple[str, str | None] | None) -> dict[str, Any]:
        reason, text = stop or (None, None)
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": text,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Return the counts. Tokens from memory are not counted as input."""
        ended = self._answer.ended
        cached = 0 if ended is None else ended.timings.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.count,
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        ended = self._answer.ended
        if ended is None or ended.reason == "length":
            return "max_tokens", None
        if self._calls:
            return "tool_use", None
        return ("end_turn", None) if ended.stop_text is None else ("stop_sequence", ended.stop_text)

    def _deltas(self, parts: list[tuple[bool, str]]) -> Iterable[bytes]:
        for is_thought, text in parts:
            kind, field = ("thinking", "thinking") if is_thought else ("text", "text")
            if not self._blocks or self._blocks[-1]["type"] != kind:
                more = {"signature": ""} if is_thought else {}
                yield from self._begin_block({"type": kind, field: "", **more})
            self._blocks[-1][field] += text
            delta = {"type": f"{kind}_delta", field: text}
            yield self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _tool_blocks(self) -> Iterable[bytes]:
        """Return the events of calls that have become complete."""
        for call in self._splitter.calls[self._calls :]:
            self._calls += 1
            block = {"type": "tool_use", "id": new_call_id(self._service), "name": call.name}
            yield from self._begin_block({**block, "input": {}})
            self._blocks[-1]["input"] = parsed(call.arguments) or {}
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _begin_block(self, block: dict[str, Any]) -> Iterable[bytes]:
        if self._blocks:
            yield self._event("content_block_stop", index=len(self._blocks) - 1)
        yield self._event("content_block_start", index=len(self._blocks), content_block=dict(block))
        self._blocks.append(block)

    def _event(self, name: str, **values: Any) -> bytes:
        return sent_event({"type": name, **values}, name)


async def messages(service: Service, body: dict[str, Any]) -> Answer:
    """Return the answer to a body of `/v1/messages`. Raises RequestError."""
    fields = Fields(body)
    conversation = _conversation(fields, service)
    tools = _tools(fields, service)
    most = fields.whole("max_tokens", 1, 1 << 30)
    if most is None:
        raise RequestError(400, "`max_tokens` is missing", "max_tokens", "missing_field")
    streams = fields.flag("stream")
    stop = fields.texts("stop_sequences", MAX_STOPS, MAX_STOP_CHARACTERS)
    sampling = read_sampling(fields, service.vocabulary, service.options.sampling)
    asked = Asked(None, most, 1, sampling, stop, streams, False)
    _refuse_unsupported(fields)
    fields.without_effect("metadata", "service_tier")
    fields.end()
    tokens, starts_thinking = await chat_tokens(service, conversation, tools)
    masks = await answer_masks(service, None, "tools", starts_thinking, tools)
    form = MessageForm(service, len(tokens), starts_thinking, tools)
    return Answer(service, 1, chat_requests(service, asked, tokens, masks=masks), form, streams)


async def count_tokens(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the number of tokens of a conversation. Raises RequestError."""
    fields = Fields(body)
    conversation = _conversation(fields, service)
    tools = _tools(fields, service)
    _refuse_unsupported(fields)
    fields.end()
    text = await service.render(conversation, tools.described)
    return {"input_tokens": len(await service.encode(text, "messages", adds_special_tokens=False))}


def _conversation(fields: Fields, service: Service) -> list[dict[str, Any]]:
    """Return the system text and the messages of a body. Raises RequestError."""
    fields.text("model", most=1024)
    system, given = fields.take("system"), fields.take("messages")
    return read_conversation(system, given, service.chat_form.takes_tools)


def _tools(fields: Fields, service: Service) -> ToolsOfRequest:
    """Return the tools of a body in Anthropic's form. Raises RequestError."""
    given, choice = fields.take("tools"), fields.object("tool_choice")
    described = given
    if isinstance(given, list):
        described = [_plain_tool(tool, f"tools[{at}]") for at, tool in enumerate(given)]
    body: dict[str, Any] = {"tools": described}
    if choice is not None:
        kind, name = choice.text("type"), choice.text("name")
        body["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
        choice.end()
        plain = {"auto": "auto", "none": "none", "any": "required", "tool": named_choice(name)}.get(kind or "")
        if plain is None:
            raise bad_field("tool_choice.type", "must be auto, any, tool or none", "unsupported_value")
        body["tool_choice"] = plain
    return read_tools(Fields(body), service)


def _plain_tool(given: Any, place: str) -> Any:
    """Return a tool in the form of OpenAI. Raises RequestError."""
    if not isinstance(given, dict):
        raise bad_field(place, "must be an object")
    fields = Fields(given, f"{place}.")
    fields.unsupported("type", "custom")
    fields.without_effect("cache_control")
    return read_function(fields, "input_schema")


def _refuse_unsupported(fields: Fields) -> None:
    fields.unsupported("thinking", {"type": "disabled"})
    fields.unsupported("mcp_servers", [])
    fields.unsupported("container")


def read_conversation(system: Any, given: Any, takes_tools: bool) -> list[dict[str, Any]]:
    """Return the system text and the messages of a body as a template gets them. Raises RequestError.

    takes_tools: whether messages may have calls of tools and their results.
    """
    if given is None:
        raise RequestError(400, "`messages` is missing", "messages", "missing_field")
    if not isinstance(given, list) or not given:
        raise bad_field("messages", f"must be a list with a message, found {shown(given)}")
    messages = list[dict[str, Any]]()
    for at, message in enumerate(given):
        messages += _read_message(message, f"messages[{at}]", takes_tools)
    if messages[-1]["role"] == "assistant":
        message = "ends with a message of the assistant, and this server cannot continue one"
        raise bad_field("messages", message, "unsupported_value")
    if system is None:
        return messages
    text = message_text(_without_marks(system), "system", ("text",))
    return [{"role": "system", "content": text}, *messages]


def _read_message(given: Any, place: str, takes_tools: bool) -> list[dict[str, Any]]:
    """Return one message as those of chat completions: first the results of tools, then the rest."""
    if not isinstance(given, dict):
        raise bad_field(place, f"must be an object, found {shown(given)}")
    if given.get("role") not in _ROLES:
        message = f"must be {' or '.join(_ROLES)}, found {shown(given.get('role'))}; `system` is a field of its own"
        raise bad_field(f"{place}.role", message, "unsupported_value")
    if not isinstance(given.get("content"), list):
        return [read_message(given, place, takes_tools)]
    rest, calls, thoughts, results = list[Any](), list[Any](), list[str](), list[dict[str, Any]]()
    for at, block in enumerate(_without_marks(given["content"])):
        kind, where = block.get("type") if isinstance(block, dict) else None, f"{place}.content[{at}]"
        if kind not in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
            rest.append(block)  # of text, or of a kind that is not known
            continue
        fields = Fields(block, f"{where}.")
        fields.take("type")
        if kind == "tool_use":
            name, value = fields.text("name"), fields.take("input")
            if value is not None and not isinstance(value, dict):
                raise bad_field(f"{where}.input", f"must be an object, found {shown(value)}")
            function = {"name": name, "arguments": json_text(value or {})}
            calls.append({"id": fields.text("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = fields.take("content")
            text = "" if content is None else message_text(_without_marks(content), f"{where}.content", ("text",))
            result = {"role": "tool", "tool_call_id": fields.text("tool_use_id"), "content": text}
            results.append(result)
            fields.flag("is_error")  # the text of the result says so
        elif kind == "thinking":
            thoughts.append(fields.text("thinking") or "")
            fields.without_effect("signature")
        else:
            fields.without_effect("data")  # a text that only its publisher can read
        fields.end()
    plain = {**given, "content": rest}
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    results = [read_message(result, f"{place}.content", takes_tools) for result in results]
    plain = read_message(plain, place, takes_tools)
    return [*results, plain] if rest or calls or not results else results


def _without_marks(content: Any) -> Any:
    """Return content whose parts have no `cache_control`, which has no effect here."""
    if not isinstance(content, list):
        return content
    return [
        {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
        for part in content
    ]
