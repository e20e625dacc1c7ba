"""`POST /v1/responses`: the Responses API of OpenAI, translated to a conversation. Nothing is stored.

Source of the form and of the events: the public reference of the Responses API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ...engine.request import Ended, Event, TokenMade
from ...tools.calls import NO_TOOLS, ToolsOfRequest
from ..answer import Answer, sent_event
from ..errors import RequestError, bad_field, shown
from ..fields import Fields
from ..sampling_fields import DEFAULT_NEW_TOKENS, Asked, read_sampling
from ..service import Service
from .chat import MAX_EFFORT_CHARACTERS, chat_requests, chat_tokens
from .forms import Collected, new_id
from .response_format import answer_masks, read_text_format
from .response_input import read_input
from .response_output import CallItem, ItemEvent, TextItem
from .tool_fields import named_choice, new_call_id, read_function, read_tools, tool_fields

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
        """Return the events before the first token."""
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        """Take an event and return those that it makes."""
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
        """Return the last event: the whole response."""
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> Iterable[bytes]:
        """Return the failure as an event."""
        failure = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response={**self._response("failed"), "error": failure})

    def error_body(self, error: RequestError) -> dict[str, Any]:
        """Return the body of a response without an answer."""
        return error.to_plain()

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
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
