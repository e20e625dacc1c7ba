"""Thinking of a model in the text of its answer: the marks around it, and how it is separated from what follows."""

from __future__ import annotations

from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"


def knows_thinking(files: Sequence[bytes]) -> bool:
    """Return whether the files of a chat template have one of the marks."""
    return any(mark.encode() in data for data in files for mark in (OPEN, CLOSE))


def starts_thinking(prompt: str) -> bool:
    """Return whether a prompt ends inside a thought, so that the answer begins there."""
    return prompt.rstrip().endswith(OPEN)


def after_thinking(prompt: str, text: str) -> str:
    """Return the part of an answer after its thought; empty if the thought has no end, all of it without a thought."""
    splitter = ThinkingSplitter(starts_thinking(prompt))
    texts = [*splitter.push(text), *splitter.flush()]
    return "".join(shown for is_thought, shown in texts if not is_thought)


class ThinkingSplitter:
    """Splits a streamed text. Text that may begin a tag is held back.

    A text that does not begin with the tag has no thinking. White space after a tag is left out.
    """

    def __init__(self, is_open: bool) -> None:
        """is_open: the prompt has opened the tag, so the text begins inside."""
        self._tag: str | None = CLOSE if is_open else OPEN
        self._strips, self._unread = is_open, ""

    @property
    def is_thinking(self) -> bool:
        return self._tag == CLOSE

    def push(self, piece: str) -> list[tuple[bool, str]]:
        texts = list[tuple[bool, str]]()
        self._unread += piece
        if self._tag == OPEN:
            self._begin()
        if self._tag == CLOSE:
            before, tag, after = self._unread.partition(CLOSE)
            shown = len(before) if tag else len(before) - overlap(before, CLOSE)
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
        self._show(texts, self._tag == CLOSE, self._unread)
        self._unread = ""
        return texts

    def _begin(self) -> None:
        """Decide whether the text begins with the tag, as soon as that is known."""
        start = self._unread.lstrip()
        if start.startswith(OPEN):
            self._tag, self._strips, self._unread = CLOSE, True, start[len(OPEN) :]
        elif not OPEN.startswith(start):
            self._tag = None

    def _show(self, texts: list[tuple[bool, str]], is_thought: bool, text: str) -> None:
        if self._strips:
            text = text.lstrip()
        if text:
            self._strips = False
            texts.append((is_thought, text))


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
