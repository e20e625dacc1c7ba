"""Separate calls of tools from the text of an answer, as it streams."""

from __future__ import annotations

from .calls import Parameters, ToolCall
from .syntax import ToolSyntax

_MAX_CALL_CHARACTERS = 1 << 20


class CallSplitter:
    """Takes calls out of a streamed text. Text that may begin a call is held back.

    What looks like a call and cannot be read stays text, so that nothing is lost.
    """

    def __init__(self, syntax: ToolSyntax, parameters: Parameters) -> None:
        self._syntax, self._parameters = syntax, parameters
        self._held, self._is_inside, self._has_calls = "", False, False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Add a piece. Returns the text that can be shown now, and the calls that are complete."""
        self._held += piece
        shown, calls = "", list[ToolCall]()
        while True:
            if not self._is_inside:
                before, mark, after = self._held.partition(self._syntax.begin)
                kept = 0 if mark else _overlap(before, self._syntax.begin)
                shown += self._without_gaps(before[: len(before) - kept])
                self._held = after if mark else before[len(before) - kept :]
                self._is_inside = bool(mark)
                if not mark:
                    return shown, calls
            if not self._syntax.end or self._syntax.end not in self._held:
                return shown, calls
            inside, _, self._held = self._held.partition(self._syntax.end)
            self._is_inside = False
            shown += self._take(inside, self._syntax.end, calls)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back, at the end of the text. A call may end with the answer."""
        held, self._held = self._held, ""
        calls = list[ToolCall]()
        if not self._is_inside:
            return self._without_gaps(held), calls
        self._is_inside = False
        return self._take(held, "", calls), calls

    def _take(self, inside: str, end: str, calls: list[ToolCall]) -> str:
        """Add the calls of a text between marks. Returns the text if it has none."""
        found = self._syntax.parse(inside, self._parameters) if len(inside) <= _MAX_CALL_CHARACTERS else None
        if found is None:
            return f"{self._syntax.begin}{inside}{end}"
        calls += found
        self._has_calls = True
        return ""

    def _without_gaps(self, text: str) -> str:
        """Return text outside of calls. White space between and after them is left out."""
        return text if not self._has_calls or text.strip() else ""


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
