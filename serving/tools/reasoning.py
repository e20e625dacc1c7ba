"""Separate what a model thinks from what it answers: the text between `<think>` and `</think>`."""

from __future__ import annotations

_OPEN, _CLOSE = "<think>", "</think>"


class PlainText:
    """A text without thinking, in the form of `ThinkingSplitter`."""

    is_thinking = False

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Return the piece."""
        return [(False, piece)] if piece else []

    def flush(self) -> list[tuple[bool, str]]:
        """Return nothing: nothing is held back."""
        return []


class ThinkingSplitter:
    """Splits a streamed text. Text that may begin a tag is held back.

    A text that does not begin with the tag has no thinking. White space after a tag is left out.
    """

    def __init__(self, is_open: bool) -> None:
        """is_open: the prompt has opened the tag, so the text begins inside."""
        self._tag: str | None = _CLOSE if is_open else _OPEN
        self._strips, self._held = is_open, ""

    @property
    def is_thinking(self) -> bool:
        """True between the tags."""
        return self._tag == _CLOSE

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text)."""
        found = list[tuple[bool, str]]()
        self._held += piece
        if self._tag == _OPEN:
            self._begin()
        if self._tag == _CLOSE:
            before, tag, after = self._held.partition(_CLOSE)
            kept = 0 if tag else _overlap(before)
            self._show(found, True, before[: len(before) - kept])
            self._held = after if tag else before[len(before) - kept :]
            if tag:
                self._tag, self._strips = None, True
        if self._tag is None:
            self._show(found, False, self._held)
            self._held = ""
        return found

    def flush(self) -> list[tuple[bool, str]]:
        """Return what was held back, at the end of the text."""
        found = list[tuple[bool, str]]()
        self._show(found, self._tag == _CLOSE, self._held)
        self._held = ""
        return found

    def _begin(self) -> None:
        """Decide whether the text begins with the tag, as soon as that is known."""
        start = self._held.lstrip()
        if start.startswith(_OPEN):
            self._tag, self._strips, self._held = _CLOSE, True, start[len(_OPEN) :]
        elif not _OPEN.startswith(start):
            self._tag = None

    def _show(self, found: list[tuple[bool, str]], is_thought: bool, text: str) -> None:
        if self._strips:
            text = text.lstrip()
        if text:
            self._strips = False
            found.append((is_thought, text))


def _overlap(text: str) -> int:
    """Return the length of the longest end of a text that is a beginning of the closing tag."""
    return next((size for size in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:size])), 0)
