"""The `input` of the Responses API as messages, as those of chat completions are."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError, bad_field, shown
from ..fields import Fields
from .chat import message_text, read_message
from .tool_fields import MAX_CALL_CHARACTERS, no_tools, read_call

_KINDS = ("message", "reasoning", "function_call", "function_call_output")
_OF_ANSWERS = ("id", "status")
"""Fields of items that come back from an answer. They say nothing about the conversation."""


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
