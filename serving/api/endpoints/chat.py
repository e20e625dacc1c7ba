"""`POST /v1/chat/completions`: continue a conversation through the bundle's chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moec.manifests.thinking import starts_thinking
from moec.runtime.text.sampling import TokenLogProb

from ...engine.request import AnswerMask, Ended, Event, GenerationRequest, TokenMade
from ...tools.calls import NO_TOOLS, ToolsOfRequest
from ..answer import Answer, OpenAIForm
from ..errors import RequestError, bad_field, shown
from ..fields import DEFAULT_NEW_TOKENS, MAX_LOG_PROBS, Asked, Fields, check_unicode, read_asked
from ..json_parts import EncodedList
from ..log_probs import ShownTokens, chat_log_prob
from ..service import Service
from .response_format import answer_masks, read_response_format
from .tool_fields import new_call_id, plain_call, read_calls, read_tools

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NO_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "keep_alive",
)
MAX_EFFORT_CHARACTERS = 32
_PICTURES = ("image", "image_url", "input_image")


class ChatForm(OpenAIForm):
    """The form of chat completions.

    starts_thinking: the prompt ends inside `<think>`.
    tools: tools that the model may call.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        service: Service,
        asked: Asked,
        prompt_tokens: int,
        starts_thinking: bool,
        tools: ToolsOfRequest = NO_TOOLS,
    ) -> None:
        super().__init__(service.options.name, asked.count, prompt_tokens, asked.includes_usage)
        self._service, self._text_of, self._streams = service, service.token_text, asked.streams
        self._log_probs = [EncodedList() for _ in range(asked.count)]
        self._shown = [ShownTokens() for _ in range(asked.count)]
        self._splitters = [service.chat_form.parts(starts_thinking, tools) for _ in range(asked.count)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(asked.count)]
        self._parts: list[list[tuple[bool, str]]] = [[] for _ in range(asked.count)]

    def begin(self) -> Iterable[bytes]:
        """Return the piece that names the role."""
        for index in range(len(self.answers)):
            yield self.chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        answer = self.answers[index]
        answer.add(event)
        if isinstance(event, TokenMade):
            yield from self._told(index, self._deltas(index, event.text), self._shown[index].add(event))
        elif isinstance(event, Ended):
            yield from self._told(index, self._deltas(index, None), self._shown[index].end(event))
            choice = {**self._choice(index, {}), "finish_reason": self.reason(index)}
            yield self.chunk([choice], timings=self.timings(index))

    def _told(self, index: int, deltas: list[dict[str, Any]], tokens: Sequence[TokenLogProb]) -> Iterable[bytes]:
        """Return the pieces of deltas. The first one has the log probabilities of tokens."""
        entries = [chat_log_prob(token, self._text_of) for token in tokens]
        if not self._streams:
            self._log_probs[index].extend(entries)
        log_probs = {"content": entries, "refusal": None} if entries else None
        for delta in deltas or ([{"content": ""}] if entries else []):
            yield self.chunk([self._choice(index, delta, log_probs)])
            log_probs = None

    def _deltas(self, index: int, text: str | None) -> list[dict[str, Any]]:
        """Return what a piece of text adds; None is the end of the text."""
        splitter, calls = self._splitters[index], self._calls[index]
        parts = splitter.flush() if text is None else splitter.push(text)
        self._parts[index] += parts
        deltas: list[dict[str, Any]] = [
            {"reasoning_content" if is_thought else "content": part} for is_thought, part in parts
        ]
        for call in splitter.calls[len(calls) :]:
            calls.append(plain_call(call, new_call_id(self._service)))
            deltas.append({"tool_calls": [{"index": len(calls) - 1, **calls[-1]}]})
        return deltas

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens, those of thinking apart."""
        thoughts = sum(splitter.thoughts for splitter in self._splitters)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": thoughts}}

    def reason(self, index: int) -> str | None:
        reason = super().reason(index)
        return "tool_calls" if reason == "stop" and self._calls[index] else reason

    def _choice(self, index: int, delta: dict[str, Any], log_probs: Any = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": None}

    def message(self, index: int) -> tuple[str, str]:
        """Return what an answer says, and what it thinks."""
        texts = ["".join(part for is_thought, part in self._parts[index] if is_thought == which) for which in (0, 1)]
        return texts[0], texts[1]

    def whole(self) -> dict[str, Any]:
        choices = []
        for index in range(len(self.answers)):
            content, thought = self.message(index)
            calls = self._calls[index]
            message: dict[str, Any] = {"role": "assistant", "refusal": None}
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
            if thought:
                message["reasoning_content"] = thought
            entries = self._log_probs[index]
            log_probs = {"content": entries, "refusal": None} if entries else None
            choices.append({
                "index": index,
                "message": message,
                "logprobs": log_probs,
                "finish_reason": self.reason(index),
            })  # fmt: skip
        return self.whole_of(choices)


async def chat(service: Service, body: dict[str, Any]) -> Answer:
    """Return the answer to a body of `/v1/chat/completions`. Raises RequestError."""
    fields = Fields(body)
    messages = read_messages(fields.take("messages"), service.chat_form.takes_tools)
    limits = ("max_completion_tokens", "max_tokens")
    asked = read_asked(fields, service.vocabulary, service.options.sampling, limits, DEFAULT_NEW_TOKENS)
    log_probs, schema = _log_probs(fields), read_response_format(fields)
    tools = read_tools(fields, service)
    fields.unsupported("modalities", ["text"])
    fields.unsupported("audio")
    fields.unsupported("prediction")
    fields.unsupported("web_search_options")
    variables = _template_variables(fields)
    fields.unsupported("verbosity", "medium")
    fields.without_effect(*_NO_EFFECT)
    fields.end()
    tokens, starts_thinking = await chat_tokens(service, messages, tools, variables)
    masks = await answer_masks(service, schema, "response_format", starts_thinking, tools, asked.count)
    form = ChatForm(service, asked, len(tokens), starts_thinking, tools)
    make = chat_requests(service, asked, tokens, log_probs, masks)
    most_tokens = asked.count * service.engine.new_tokens_limit(tokens, asked.max_new_tokens)
    log_prob_bytes = service.log_probs.needed_bytes(most_tokens, log_probs)
    return Answer(service, asked.count, make, form, asked.streams, log_prob_bytes)


def chat_requests(
    service: Service,
    asked: Asked,
    tokens: Sequence[int],
    log_probs: int | None = None,
    masks: Sequence[AnswerMask] | None = None,
) -> Callable[[Sequence[Callable[[Event], None]]], list[GenerationRequest]]:
    """Return what makes the requests of a conversation, one for each answer. masks: one for each, or None."""

    def make(receivers: Sequence[Callable[[Event], None]]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                list(tokens),
                asked.max_new_tokens,
                deliver,
                replace(asked.sampling, seed=asked.sampling.seed + at),
                asked.stop,
                log_probs,
                deadline_s=service.options.deadline_s,
                mask=None if masks is None else masks[at],
                marks=service.chat_form.marks,
            )
            for at, deliver in enumerate(receivers)
        ]

    return make


async def chat_tokens(
    service: Service,
    messages: Sequence[dict[str, Any]],
    tools: ToolsOfRequest = NO_TOOLS,
    variables: Mapping[str, Any] | None = None,
) -> tuple[list[int], bool]:
    """Return the tokens of a conversation, and whether they end inside `<think>`. Raises RequestError.

    variables: more variables of the template.
    """
    text = await service.render(messages, tools.described, variables or {})
    tokens = await service.encode(text, "messages", adds_special_tokens=False)
    service.check_prompt(tokens, "messages")
    return tokens, starts_thinking(text)


def _template_variables(fields: Fields) -> dict[str, Any]:
    """Return the variables that a request hands to the chat template. Raises RequestError."""
    variables, effort = fields.take("chat_template_kwargs"), fields.text("reasoning_effort", most=MAX_EFFORT_CHARACTERS)
    if variables is not None and not isinstance(variables, dict):
        raise bad_field("chat_template_kwargs", f"must be an object, found {shown(variables)}")
    return {**({} if effort is None else {"reasoning_effort": effort}), **(variables or {})}


def _log_probs(fields: Fields) -> int | None:
    is_asked, count = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_LOG_PROBS)
    if count and not is_asked:
        raise bad_field("top_logprobs", "is only for `logprobs`")
    return (count or 0) if is_asked else None


def read_messages(given: Any, takes_tools: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a conversation with `role` and `content`, as a template gets them. Raises RequestError.

    takes_tools: whether messages may have calls of tools and their results.
    """
    if given is None:
        raise RequestError(400, "`messages` is missing", "messages", "missing_field")
    if not isinstance(given, list):
        raise bad_field("messages", f"must be a list of messages, found {shown(given)}")
    if not given:
        raise bad_field("messages", "must have a message, found an empty list")
    return [read_message(message, f"messages[{at}]", takes_tools) for at, message in enumerate(given)]


def read_message(given: Any, place: str, takes_tools: bool = False) -> dict[str, Any]:
    """Return one message as a template gets it. place: its name in errors. Raises RequestError."""
    roles = {**_ROLES, "tool": "tool"} if takes_tools else _ROLES
    if not isinstance(given, dict):
        raise bad_field(place, f"must be an object, found {shown(given)}")
    fields = Fields(given, f"{place}.")
    role = fields.text("role")
    if role is None:
        raise RequestError(400, f"`{place}.role` is missing", f"{place}.role", "missing_field")
    if role not in roles:
        raise bad_field(f"{place}.role", f"must be {', '.join(roles)}, found {shown(role)}", "unsupported_value")
    message: dict[str, Any] = {"role": roles[role]}
    content = fields.take("content")
    if role == "assistant" and "tool" in roles:
        calls = read_calls(fields.take("tool_calls"), f"{place}.tool_calls")
        if calls:
            message["tool_calls"] = calls
            content = "" if content is None else content
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", "", most=256)
        name = fields.text("name", most=256)
        if name is not None:
            message["name"] = name
    message["content"] = message_text(content, f"{place}.content")
    thought = fields.take("reasoning_content") or fields.take("reasoning")  # the name of other servers
    if role == "assistant" and isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    for name, *harmless in (("tool_calls", []), ("function_call",), ("refusal",), ("audio",), ("annotations", [])):
        fields.unsupported(name, *harmless)
    if role != "tool" and (name := fields.text("name", most=256)) is not None:
        message["name"] = name
    fields.without_effect("id", "opts", "metadata", "provider_specific_fields", "reasoning", "reasoning_details")
    fields.without_effect("timestamp", "cache_control")
    fields.end()
    return message


def message_text(content: Any, place: str, kinds: tuple[str, ...] = ("text", "input_text", "output_text")) -> str:
    """Return the text of a message: a text, or a list of text parts. Raises RequestError."""
    if isinstance(content, str):
        check_unicode(content, place)
        return content
    if not isinstance(content, list):
        raise bad_field(place, f"must be a text or a list of text parts, found {shown(content)}")
    parts = []
    for at, part in enumerate(content):
        where = f"{place}[{at}]"
        if isinstance(part, dict) and part.get("type") in _PICTURES:
            raise bad_field(where, "is an image, and this model reads no images", "unsupported_value")
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise bad_field(where, "must be a part of type `text` with a `text`", "unsupported_value")
        fields = Fields(part, f"{where}.")
        fields.take("type")
        parts.append(fields.text("text") or "")
        fields.without_effect(
            "annotations", "citations", "logprobs", "cache_control"
        )  # of answers that come back in a history
        fields.end()
    return "".join(parts)
