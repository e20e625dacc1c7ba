"""`POST /v1/responses`: the Responses API of OpenAI, translated to a conversation. Nothing is stored.

Source of the form and of the events: the public reference of the Responses API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from ...engine.request import Ended, Event, TokenMade
from ...tools.calls import NO_TOOLS, ToolCall, ToolsOfRequest
from ..answer import Answer, Collected, new_id, sent_event
from ..errors import RequestError, bad_field, shown
from ..fields import DEFAULT_NEW_TOKENS, Asked, Fields, read_sampling
from ..service import Service
from .chat import MAX_EFFORT_CHARACTERS, chat_requests, chat_tokens, message_text, read_message
from .response_format import answer_masks, read_text_format
from .tool_fields import (
    MAX_CALL_CHARACTERS,
    named_choice,
    new_call_id,
    no_tools,
    read_call,
    read_function,
    read_tools,
    tool_fields,
)

_NO_EFFECT = (
    "metadata",
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_HARMLESS_INCLUDES = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
)
"""What a response never has here: built-in tools, images, and thinking that is hidden from the client."""
ItemEvent: TypeAlias = tuple[str, dict[str, Any]]
"""Name of an event after `response.`, and its fields without the number of the event and the place of the item."""
_KINDS = ("message", "reasoning", "function_call", "function_call_output")
_OF_ANSWERS = ("id", "status")
"""Fields of items that come back from an answer. They say nothing about the conversation."""


class ResponseForm:
    """The form of a response: items of thinking, text and calls of tools.

    echoed: fields of the request that the response repeats.
    """

    def __init__(
        self,
        service: Service,
        prompt_tokens: int,
        starts_thinking: bool,
        echoed: dict[str, Any],
        tools: ToolsOfRequest = NO_TOOLS,
    ) -> None:
        self._answer, self._splitter = Collected(), service.chat_form.parts(starts_thinking, tools)
        self._head = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        self._service, self._prompt_tokens, self._echoed = service, prompt_tokens, echoed
        self._items: list[TextItem | CallItem] = []
        self._open: TextItem | None = None
        self._calls, self._number = 0, -1

    def begin(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        self._answer.add(event)
        if isinstance(event, TokenMade):
            yield from self._told(self._splitter.push(event.text))
        elif isinstance(event, Ended):
            yield from self._told(self._splitter.flush())
            status = "completed" if event.reason == "stop" else "incomplete"
            if all(isinstance(item, TextItem) and item.is_thought for item in self._items):
                yield from self._close_text(status)
                yield from self._told([(False, "")])
            yield from self._close_text(status)

    def finish(self) -> Iterable[bytes]:
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> Iterable[bytes]:
        failure = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response={**self._response("failed"), "error": failure})

    def error_body(self, error: RequestError) -> dict[str, Any]:
        return error.to_plain()

    def whole(self) -> dict[str, Any]:
        ended = self._answer.ended
        status = "completed" if ended is not None and ended.reason == "stop" else "incomplete"
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = [item.to_plain() for item in self._items]
        cached = 0 if ended is None else ended.timings.cached_tokens
        response["usage"] = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._answer.count,
            "output_tokens_details": {"reasoning_tokens": self._splitter.thoughts},
            "total_tokens": self._prompt_tokens + self._answer.count,
        }
        return {**response, "timings": {} if ended is None else ended.timings.to_plain()}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._service.options.name,
            "output": [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
            **self._echoed,
        }

    def _told(self, parts: list[tuple[bool, str]]) -> Iterable[bytes]:
        """Return the events of more text, and of calls that have become complete."""
        for is_thought, text in parts:
            if self._open is None or self._open.is_thought != is_thought:
                yield from self._close_text()
                self._open = TextItem(is_thought)
                self._items.append(self._open)
                yield from self._events(self._open.begin())
            yield from self._events(self._open.push(text))
        for call in self._splitter.calls[self._calls :]:
            yield from self._close_text()
            item = CallItem(call, new_call_id(self._service))
            self._items.append(item)
            self._calls += 1
            yield from self._events(item.events())

    def _close_text(self, status: str = "completed") -> Iterable[bytes]:
        """End the item of text that is open, if there is one."""
        if self._open is not None:
            yield from self._events(self._open.end(status))
        self._open = None

    def _events(self, events: Iterable[ItemEvent]) -> Iterable[bytes]:
        """Return events of the last item."""
        for name, values in events:
            yield self._event(f"response.{name}", output_index=len(self._items) - 1, **values)

    def _event(self, name: str, /, **values: Any) -> bytes:
        self._number += 1
        return sent_event({"type": name, "sequence_number": self._number, **values}, name)


async def responses(service: Service, body: dict[str, Any]) -> Answer:
    """Return the answer to a body of `/v1/responses`. Raises RequestError."""
    fields = Fields(body)
    instructions = fields.text("instructions")
    conversation = read_input(fields.take("input"), service.chat_form.takes_tools)
    if instructions:
        conversation = [{"role": "system", "content": instructions}, *conversation]
    fields.text("model", most=1024)
    most = fields.whole("max_output_tokens", 1, 1 << 30, DEFAULT_NEW_TOKENS) or DEFAULT_NEW_TOKENS
    streams = fields.flag("stream")
    sampling = read_sampling(fields, service.vocabulary, service.options.sampling)
    asked = Asked(None, most, 1, sampling, (), streams, False)
    schema, text_format = _text_format(fields)
    tools, echoed_tools = _tools(fields, service)
    variables = _template_variables(fields)
    _refuse_unsupported(fields)
    fields.without_effect(*_NO_EFFECT)
    fields.end()
    tokens, starts_thinking = await chat_tokens(service, conversation, tools, variables)
    masks = await answer_masks(service, schema, "text.format", starts_thinking, tools)
    echoed = {
        "text": {"format": text_format},
        "instructions": instructions,
        "max_output_tokens": None if most == DEFAULT_NEW_TOKENS else most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **echoed_tools,
    }
    form = ResponseForm(service, len(tokens), starts_thinking, echoed, tools)
    make = chat_requests(service, asked, tokens, masks=masks)
    return Answer(service, 1, make, form, streams)


def _tools(fields: Fields, service: Service) -> tuple[ToolsOfRequest, dict[str, Any]]:
    """Return the tools of a body, and the fields about them that the response repeats. Raises RequestError.

    Only tools that the model gets are repeated, because the context bounds their memory.
    """
    given, choice = fields.take("tools"), fields.take("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls", True)
    body: dict[str, Any] = {"tools": given, "tool_choice": choice, "parallel_tool_calls": is_parallel}
    if isinstance(given, list):
        body["tools"] = [
            read_function(tool_fields(tool, f"tools[{at}]"), "parameters") for at, tool in enumerate(given)
        ]
    if isinstance(choice, dict):
        named = Fields(choice, "tool_choice.")
        kind, name = named.text("type"), named.text("name")
        if kind != "function":
            raise bad_field("tool_choice.type", f"must be function, found {shown(kind)}", "unsupported_value")
        named.end()
        choice, body["tool_choice"] = {"type": kind, "name": name}, named_choice(name)
    tools = read_tools(Fields(body), service)
    repeated = [{"type": "function", "strict": False, **tool["function"]} for tool in tools.described]
    return tools, {"tools": repeated, "tool_choice": choice or "auto", "parallel_tool_calls": is_parallel}


def _text_format(fields: Fields) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the schema that the answer must follow, or None, and the format that the response repeats."""
    text = fields.object("text")
    if text is None:
        return None, {"type": "text"}
    given = text.peek("format")
    schema = read_text_format(text)
    text.unsupported("verbosity", "medium")
    text.end()
    return schema, given or {"type": "text"}


def _template_variables(fields: Fields) -> dict[str, Any]:
    """Return the variables that a request hands to the chat template. Raises RequestError."""
    reasoning = fields.object("reasoning")
    if reasoning is None:
        return {}
    effort = reasoning.text("effort", most=MAX_EFFORT_CHARACTERS)
    for name in ("summary", "generate_summary"):
        reasoning.unsupported(name)
    reasoning.end()
    return {} if effort is None else {"reasoning_effort": effort}


def _refuse_unsupported(fields: Fields) -> None:
    for include in fields.texts("include", 16, 64):
        if include not in _HARMLESS_INCLUDES:
            raise bad_field("include", f"is not supported with {shown(include)}", "unsupported_value")
    fields.unsupported("previous_response_id")
    fields.unsupported("conversation")
    fields.unsupported("background", False)
    fields.unsupported("prompt")
    fields.unsupported("truncation", "disabled")
    fields.unsupported("top_logprobs", 0)
    fields.unsupported("max_tool_calls")
    options = fields.object("stream_options")
    if options is not None:
        options.without_effect("include_obfuscation")
        options.end()


class TextItem:
    """An item of text, which arrives in pieces.

    is_thought: thinking, not a message.
    """

    def __init__(self, is_thought: bool) -> None:
        self.is_thought = is_thought
        self._kind, prefix = ("reasoning_text", "rs") if is_thought else ("output_text", "msg")
        self._id, self._pieces, self._status = new_id(prefix), list[str](), "in_progress"
        self._place = {"item_id": self._id, "content_index": 0}
        self._log_probs: dict[str, Any] = {} if is_thought else {"logprobs": []}

    def begin(self) -> Iterable[ItemEvent]:
        """Return the events before the first piece."""
        yield "output_item.added", {"item": self.to_plain()}
        yield "content_part.added", {**self._place, "part": self._part("")}

    def push(self, piece: str) -> Iterable[ItemEvent]:
        """Add a piece and return its events."""
        self._pieces.append(piece)
        if piece:
            yield f"{self._kind}.delta", {**self._place, "delta": piece, **self._log_probs}

    def end(self, status: str) -> Iterable[ItemEvent]:
        """Return the events after the last piece. status: `completed`, or `incomplete` for a text that was cut."""
        self._status = status
        text = "".join(self._pieces)
        yield f"{self._kind}.done", {**self._place, "text": text, **self._log_probs}
        yield "content_part.done", {**self._place, "part": self._part(text)}
        yield "output_item.done", {"item": self.to_plain()}

    def to_plain(self) -> dict[str, Any]:
        """Return the item, without its text before it has ended."""
        status = self._status
        content = [] if status == "in_progress" else [self._part("".join(self._pieces))]
        if self.is_thought:
            return {"type": "reasoning", "id": self._id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self._id, "role": "assistant", "content": content, "status": status}

    def _part(self, text: str) -> dict[str, Any]:
        if self.is_thought:
            return {"type": self._kind, "text": text}
        return {"type": self._kind, "text": text, "annotations": [], "logprobs": []}


class CallItem:
    """A call of a tool, which is told whole.

    call_id: identifier that the result of the call repeats.
    """

    def __init__(self, call: ToolCall, call_id: str) -> None:
        self._call, self._call_id, self._id = call, call_id, new_id("fc")

    def events(self) -> Iterable[ItemEvent]:
        place, arguments = {"item_id": self._id}, self._call.arguments
        yield "output_item.added", {"item": {**self.to_plain("in_progress"), "arguments": ""}}
        yield "function_call_arguments.delta", {**place, "delta": arguments}
        yield "function_call_arguments.done", {**place, "name": self._call.name, "arguments": arguments}
        yield "output_item.done", {"item": self.to_plain()}

    def to_plain(self, status: str = "completed") -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._call.name,
            "arguments": self._call.arguments,
            "status": status,
        }


def read_input(given: Any, takes_tools: bool) -> list[dict[str, Any]]:
    """Return the messages of `input`: a text, or a list of items. Raises RequestError.

    takes_tools: whether items may be calls of tools and their results.
    """
    if given is None:
        raise RequestError(400, "`input` is missing", "input", "missing_field")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise bad_field("input", f"must be a text or a list of items, found {shown(given)}")
    reader = _Items(takes_tools)
    for at, item in enumerate(items):
        reader.add(item, f"input[{at}]")
    return reader.messages()


class _Items:
    """Items that become messages, one after the other.

    What the model said before the next message or result is a turn: one message of the assistant.
    """

    def __init__(self, takes_tools: bool) -> None:
        self._takes_tools = takes_tools
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        self._thoughts: list[str] = []
        self._open_calls: dict[str, str] = {}

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of all items. Raises RequestError without one, and for a call without a result."""
        for call_id, place in self._open_calls.items():
            raise bad_field(f"{place}.call_id", f"has no `function_call_output` with {shown(call_id)} after it")
        if not self._messages:
            raise bad_field("input", "must have a message, found none")
        return self._messages

    def add(self, item: Any, place: str) -> None:
        """Take the next item. Raises RequestError."""
        if not isinstance(item, dict):
            raise bad_field(place, f"must be an object, found {shown(item)}")
        fields = Fields(item, f"{place}.")
        kind = fields.text("type", "message")
        if kind == "message":
            self._message({name: value for name, value in item.items() if name not in ("type", *_OF_ANSWERS)}, place)
        elif kind == "reasoning":
            self._reasoning(fields)
        elif kind == "function_call" and self._takes_tools:
            self._call(fields)
        elif kind == "function_call_output" and self._takes_tools:
            self._result(fields)
        elif kind in _KINDS:
            raise no_tools(f"{place}.type")
        else:
            raise bad_field(f"{place}.type", f"must be {', '.join(_KINDS)}, found {shown(kind)}", "unsupported_value")

    def _message(self, item: dict[str, Any], place: str) -> None:
        message = read_message(item, place)
        if message["role"] != "assistant":
            self._add(message)
            return
        if self._turn is not None and "tool_calls" not in self._turn:  # two texts without calls are two messages
            self._turn = None
        turn = self._answer()
        turn["content"] += message["content"]
        if "reasoning_content" in message:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + message["reasoning_content"]

    def _reasoning(self, fields: Fields) -> None:
        """Keep thinking for the text or the call after it. A summary and encrypted thinking are not read."""
        content = fields.take("content")
        if content is not None:
            self._thoughts.append(message_text(content, f"{fields.place}content", ("reasoning_text",)))

    def _call(self, fields: Fields) -> None:
        fields.without_effect(*_OF_ANSWERS)
        call_id = _call_id(fields)
        if call_id in self._open_calls:
            raise bad_field(f"{fields.place}call_id", f"is that of another call, {shown(call_id)}")
        self._answer().setdefault("tool_calls", []).append(read_call(fields, call_id))
        self._open_calls[call_id] = fields.place.rstrip(".")

    def _result(self, fields: Fields) -> None:
        fields.without_effect(*_OF_ANSWERS)
        call_id = _call_id(fields)
        if self._open_calls.pop(call_id, None) is None:
            raise bad_field(
                f"{fields.place}call_id", f"must be that of an earlier call without a result, found {shown(call_id)}"
            )
        message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id}
        name = fields.text("name", most=MAX_CALL_CHARACTERS)
        if name is not None:
            message["name"] = name
        message["content"] = message_text(fields.take("output"), f"{fields.place}output")
        fields.end()
        self._add(message)

    def _add(self, message: dict[str, Any]) -> None:
        """Add a message that is not the model's."""
        self._messages.append(message)
        self._turn, self._thoughts = None, []

    def _answer(self) -> dict[str, Any]:
        """Return the message of the model that goes on, with the thinking before this item."""
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self._messages.append(self._turn)
        if self._thoughts:
            self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + "".join(self._thoughts)
        self._thoughts = []
        return self._turn


def _call_id(fields: Fields) -> str:
    call_id = fields.text("call_id", most=MAX_CALL_CHARACTERS)
    if not call_id:
        raise RequestError(400, f"`{fields.place}call_id` is missing", f"{fields.place}call_id", "missing_field")
    return call_id
