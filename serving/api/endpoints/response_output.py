"""Items of a response, and the events that tell them: thinking, messages, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from ...tools.calls import ToolCall
from .forms import new_id

ItemEvent: TypeAlias = tuple[str, dict[str, Any]]
"""Name of an event after `response.`, and its fields without the number of the event and the place of the item."""


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
        """Return all events of the call."""
        place, arguments = {"item_id": self._id}, self._call.arguments
        yield "output_item.added", {"item": {**self.to_plain("in_progress"), "arguments": ""}}
        yield "function_call_arguments.delta", {**place, "delta": arguments}
        yield "function_call_arguments.done", {**place, "name": self._call.name, "arguments": arguments}
        yield "output_item.done", {"item": self.to_plain()}

    def to_plain(self, status: str = "completed") -> dict[str, Any]:
        """Return the item."""
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._call.name,
            "arguments": self._call.arguments,
            "status": status,
        }
