"""Separate what a model thinks, what it answers, and its calls of tools, in a text with tags, as it streams."""

from __future__ import annotations

from .calls import Parameters, ToolCall
from .syntax import ToolSyntax

_OPEN, _CLOSE = "<think>", "</think>"
_MAX_CALL_CHARACTERS = 1 << 20


class TaggedParts:
    """Thinking between `<think>` tags, and calls between the marks of a template.

    calls: the calls that are complete, in their order.
    thoughts: number of pieces that are thinking or a tag around it.
    """

    def __init__(
        self, thinking: ThinkingSplitter | None, calls: CallSplitter | None, most_calls: int | None = None
    ) -> None:
        """thinking, calls: None where the answer has none.

        most_calls: calls beyond this number are left out; None for all.
        """
        self.calls, self.thoughts = list[ToolCall](), 0
        self._thinking, self._splitter, self._most_calls = thinking, calls, most_calls

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text)."""
        if self._thinking is None:
            return self._without_calls([(False, piece)] if piece else [])
        was_thinking = self._thinking.is_thinking
        parts = self._thinking.push(piece)
        self.thoughts += was_thinking or self._thinking.is_thinking
        return self._without_calls(parts)

    def flush(self) -> list[tuple[bool, str]]:
        """Return the texts that were held back, at the end of the answer."""
        parts = self._without_calls([] if self._thinking is None else self._thinking.flush())
        if self._splitter is None:
            return parts
        text, calls = self._splitter.flush()
        self._add(calls)
        return [*parts, (False, text)] if text else parts

    def _without_calls(self, parts: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        if self._splitter is None:
            return parts
        texts = list[tuple[bool, str]]()
        for is_thought, text in parts:
            shown = text
            if not is_thought:
                shown, calls = self._splitter.push(text)
                self._add(calls)
            if shown:
                texts.append((is_thought, shown))
        return texts

    def _add(self, calls: list[ToolCall]) -> None:
        self.calls = (self.calls + calls)[: self._most_calls]


class ThinkingSplitter:
    """Splits a streamed text. Text that may begin a tag is held back.

    A text that does not begin with the tag has no thinking. White space after a tag is left out.
    """

    def __init__(self, is_open: bool) -> None:
        """is_open: the prompt has opened the tag, so the text begins inside."""
        self._tag: str | None = _CLOSE if is_open else _OPEN
        self._strips, self._unread = is_open, ""

    @property
    def is_thinking(self) -> bool:
        """True between the tags."""
        return self._tag == _CLOSE

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text)."""
        texts = list[tuple[bool, str]]()
        self._unread += piece
        if self._tag == _OPEN:
            self._begin()
        if self._tag == _CLOSE:
            before, tag, after = self._unread.partition(_CLOSE)
            shown = len(before) if tag else len(before) - _overlap(before, _CLOSE)
            self._show(texts, True, before[:shown])
            self._unread = after if tag else before[shown:]
            if tag:
                self._tag, self._strips = None, True
        if self._tag is None:
            self._show(texts, False, self._unread)
            self._unread = ""
        return texts

    def flush(self) -> list[tuple[bool, str]]:
        """Return what was held back, at the end of the text."""
        texts = list[tuple[bool, str]]()
        self._show(texts, self._tag == _CLOSE, self._unread)
        self._unread = ""
        return texts

    def _begin(self) -> None:
        """Decide whether the text begins with the tag, as soon as that is known."""
        start = self._unread.lstrip()
        if start.startswith(_OPEN):
            self._tag, self._strips, self._unread = _CLOSE, True, start[len(_OPEN) :]
        elif not _OPEN.startswith(start):
            self._tag = None

    def _show(self, texts: list[tuple[bool, str]], is_thought: bool, text: str) -> None:
        if self._strips:
            text = text.lstrip()
        if text:
            self._strips = False
            texts.append((is_thought, text))


class CallSplitter:
    """Takes calls out of a streamed text. Text that may begin a call is held back.

    What looks like a call and cannot be read stays text, so that nothing is lost.
    """

    def __init__(self, syntax: ToolSyntax, parameters: Parameters) -> None:
        self._syntax, self._parameters = syntax, parameters
        self._unread, self._is_inside, self._has_calls = "", False, False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Add a piece. Returns the text that can be shown now, and the calls that are complete."""
        self._unread += piece
        shown, calls = "", list[ToolCall]()
        while True:
            if not self._is_inside:
                before, mark, after = self._unread.partition(self._syntax.begin)
                size = len(before) if mark else len(before) - _overlap(before, self._syntax.begin)
                shown += self._without_gaps(before[:size])
                self._unread = after if mark else before[size:]
                self._is_inside = bool(mark)
                if not mark:
                    return shown, calls
            if not self._syntax.end or self._syntax.end not in self._unread:
                return shown, calls
            inside, _, self._unread = self._unread.partition(self._syntax.end)
            self._is_inside = False
            shown += self._take(inside, self._syntax.end, calls)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back, at the end of the text. A call may end with the answer."""
        unread, self._unread = self._unread, ""
        calls = list[ToolCall]()
        if not self._is_inside:
            return self._without_gaps(unread), calls
        self._is_inside = False
        return self._take(unread, "", calls), calls

    def _take(self, inside: str, end: str, calls: list[ToolCall]) -> str:
        """Add the calls of a text between marks. Returns the text if it has none."""
        parsed = self._syntax.parse(inside, self._parameters) if len(inside) <= _MAX_CALL_CHARACTERS else None
        if parsed is None:
            return f"{self._syntax.begin}{inside}{end}"
        calls += parsed
        self._has_calls = True
        return ""

    def _without_gaps(self, text: str) -> str:
        """Return text outside of calls. White space between and after them is left out."""
        return text if not self._has_calls or text.strip() else ""


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
