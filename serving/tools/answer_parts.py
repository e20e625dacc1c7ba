"""Parts of what a model writes: thinking, text, and calls of tools."""

from __future__ import annotations

from typing import Protocol

from .calls import ToolCall
from .harmony import HarmonySplitter
from .reasoning import PlainText, ThinkingSplitter
from .splitter import CallSplitter


class AnswerParts(Protocol):
    """Splits a streamed answer.

    calls: the calls that are complete, in their order.
    thoughts: number of pieces that are thinking or a tag around it.
    """

    calls: list[ToolCall]
    thoughts: int

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text)."""

    def flush(self) -> list[tuple[bool, str]]:
        """Return the texts that were held back, at the end of the answer."""


class TaggedParts:
    """Thinking between `<think>` tags, and calls between the marks of a template.

    most_calls: calls beyond this number are left out; None for all.
    """

    def __init__(
        self, thinking: ThinkingSplitter | PlainText, calls: CallSplitter | None, most_calls: int | None = None
    ) -> None:
        self.calls, self.thoughts = list[ToolCall](), 0
        self._thinking, self._splitter, self._most = thinking, calls, most_calls

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now."""
        was_thinking = self._thinking.is_thinking
        parts = self._thinking.push(piece)
        self.thoughts += was_thinking or self._thinking.is_thinking
        return self._without_calls(parts)

    def flush(self) -> list[tuple[bool, str]]:
        """Return the texts that were held back."""
        found = self._without_calls(self._thinking.flush())
        if self._splitter is None:
            return found
        text, calls = self._splitter.flush()
        self._add(calls)
        return [*found, (False, text)] if text else found

    def _without_calls(self, parts: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        if self._splitter is None:
            return parts
        found = list[tuple[bool, str]]()
        for is_thought, text in parts:
            shown = text
            if not is_thought:
                shown, calls = self._splitter.push(text)
                self._add(calls)
            if shown:
                found.append((is_thought, shown))
        return found

    def _add(self, calls: list[ToolCall]) -> None:
        self.calls = (self.calls + calls)[: self._most]


class HarmonyParts:
    """The channels of gpt-oss. most_calls: as in `TaggedParts`."""

    def __init__(self, most_calls: int | None = None) -> None:
        self.calls, self.thoughts = list[ToolCall](), 0
        self._splitter, self._most = HarmonySplitter(), most_calls

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now."""
        was_thinking = self._splitter.is_thinking
        texts, calls = self._splitter.push(piece)
        self.thoughts += was_thinking or self._splitter.is_thinking
        self.calls = (self.calls + calls)[: self._most]
        return texts

    def flush(self) -> list[tuple[bool, str]]:
        """Return the texts that were held back."""
        texts, calls = self._splitter.flush()
        self.calls = (self.calls + calls)[: self._most]
        return texts
