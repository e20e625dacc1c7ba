"""`POST /v1/responses`: the Responses API of OpenAI, translated to a conversation. Nothing is stored.

Source of the form and of the events: the public reference of the Responses API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ...engine.request import Ended, Event, TokenMade
from ...tools.calls import NO_TOOLS
from ..answer import Answer, sent_event
from ..errors import RequestError, bad_field, shown
from ..fields import Fields
from ..sampling_fields import DEFAULT_NEW_TOKENS, Asked, read_sampling
from ..service import Service
from .chat import chat_requests, chat_tokens, read_messages
from .forms import Collected, new_id
from .response_format import mask_maker, read_text_format

_NO_EFFECT = (
    "metadata",
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "include",
)


class ResponseForm:
    """The form of a response. Thinking is an item of its own before the message.

    echoed: fields of the request that the response repeats.
    """

    def __init__(self, service: Service, prompt_tokens: int, starts_thinking: bool, echoed: dict[str, Any]) -> None:
        self._answer, self._splitter = Collected(), service.chat_form.parts(starts_thinking, NO_TOOLS)
        self._head = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        self._model, self._prompt_tokens, self._echoed = service.options.name, prompt_tokens, echoed
        self._items: list[tuple[bool, str, list[str]]] = []
        self._number = -1

    def begin(self) -> Iterable[bytes]:
        """Return the events before the first token."""
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        """Take an event and return those that it makes."""
        self._answer.add(event)
        if isinstance(event, TokenMade):
            yield from self._deltas(self._splitter.push(event.text))
        elif isinstance(event, Ended):
            yield from self._deltas(self._splitter.flush())
            if not self._items or self._items[-1][0]:
                yield from self._deltas([(False, "")])
            yield from self._close_item()

    def finish(self) -> Iterable[bytes]:
        """Return the last event: the whole response."""
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> Iterable[bytes]:
        """Return the failure as an event."""
        told = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response={**self._response("failed"), "error": told})

    def error_body(self, error: RequestError) -> dict[str, Any]:
        """Return the body of a response without an answer."""
        return error.to_plain()

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        ended = self._answer.ended
        status = "completed" if ended is not None and ended.reason == "stop" else "incomplete"
        found = self._response(status)
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        found["output"] = [self._item(*item, "completed") for item in self._items]
        cached = 0 if ended is None else ended.timings.cached_tokens
        found["usage"] = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": self._answer.count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + self._answer.count,
        }
        return {**found, "timings": {} if ended is None else ended.timings.to_plain()}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "previous_response_id": None,
            "parallel_tool_calls": False,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
            **self._echoed,
        }

    def _item(self, is_thought: bool, item_id: str, pieces: list[str], status: str) -> dict[str, Any]:
        content = [self._part(is_thought, "".join(pieces))] if status == "completed" else []
        if is_thought:
            return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}

    def _part(self, is_thought: bool, text: str) -> dict[str, Any]:
        if is_thought:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _deltas(self, parts: list[tuple[bool, str]]) -> Iterable[bytes]:
        for is_thought, text in parts:
            if not self._items or self._items[-1][0] != is_thought:
                yield from self._close_item()
                self._items.append((is_thought, new_id("rs" if is_thought else "msg"), []))
                item = self._item(*self._items[-1], "in_progress")
                yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
                yield self._event("response.content_part.added", **self._place(), part=self._part(is_thought, ""))
            self._items[-1][2].append(text)
            if text:
                more: dict[str, Any] = {} if is_thought else {"logprobs": []}
                yield self._event(f"response.{self._kind()}.delta", **self._place(), delta=text, **more)

    def _close_item(self) -> Iterable[bytes]:
        """End the last item, if there is one."""
        if not self._items:
            return
        is_thought, _, pieces = self._items[-1]
        text = "".join(pieces)
        more: dict[str, Any] = {} if is_thought else {"logprobs": []}
        yield self._event(f"response.{self._kind()}.done", **self._place(), text=text, **more)
        yield self._event("response.content_part.done", **self._place(), part=self._part(is_thought, text))
        item = self._item(*self._items[-1], "completed")
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _kind(self) -> str:
        return "reasoning_text" if self._items[-1][0] else "output_text"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1][1], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, name: str, **values: Any) -> bytes:
        self._number += 1
        return sent_event({"type": name, "sequence_number": self._number, **values}, name)


async def responses(service: Service, body: dict[str, Any]) -> Answer:
    """Return the answer to a body of `/v1/responses`. Raises RequestError."""
    fields = Fields(body)
    instructions = fields.text("instructions")
    conversation = _conversation(fields.take("input"), instructions)
    fields.text("model", most=1024)
    most = fields.whole("max_output_tokens", 1, 1 << 30, DEFAULT_NEW_TOKENS) or DEFAULT_NEW_TOKENS
    streams = fields.flag("stream")
    sampling = read_sampling(fields, service.vocabulary)
    asked = Asked(None, most, 1, sampling, (), streams, False)
    schema, text_format = _text_format(fields)
    _refuse_unsupported(fields)
    fields.without_effect(*_NO_EFFECT)
    fields.end()
    tokens, starts_thinking = await chat_tokens(service, conversation)
    make_mask = await mask_maker(service, schema, "text.format", starts_thinking)
    echoed = {
        "text": {"format": text_format},
        "instructions": instructions,
        "max_output_tokens": None if most == DEFAULT_NEW_TOKENS else most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    form = ResponseForm(service, len(tokens), starts_thinking, echoed)
    make = chat_requests(service, asked, tokens, make_mask=make_mask)
    return Answer(service, 1, make, form, streams)


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


def _conversation(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of `input`: a text, or items of type message. Raises RequestError."""
    if given is None:
        raise RequestError(400, "`input` is missing", "input", "missing_field")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise bad_field("input", f"must be a text or a list of messages, found {shown(given)}")
    found = []
    for at, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":  # thinking of earlier turns, which templates leave out
            continue
        if kind != "message":
            raise bad_field(f"input[{at}]", "must be an item of type `message`", "unsupported_value")
        found.append({name: value for name, value in item.items() if name not in ("type", "id", "status")})
    try:
        messages = read_messages(found)
    except RequestError as error:
        param = (error.param or "").replace("messages", "input", 1)
        raise RequestError(error.status, error.message.replace("messages", "input", 1), param, error.code) from error
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _refuse_unsupported(fields: Fields) -> None:
    fields.unsupported("tools", [])
    fields.unsupported("tool_choice", "none", "auto")
    fields.unsupported("previous_response_id")
    fields.unsupported("conversation")
    fields.unsupported("background", False)
    fields.unsupported("prompt")
    fields.unsupported("truncation", "disabled")
    fields.unsupported("reasoning", {})
    fields.unsupported("top_logprobs", 0)
    fields.unsupported("max_tool_calls")
    options = fields.object("stream_options")
    if options is not None:
        options.without_effect("include_obfuscation")
        options.end()
