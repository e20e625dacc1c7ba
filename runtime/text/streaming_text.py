"""Text that streams without ever splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .tokenizer import BundleTokenizer, load_tokenizer

__all__ = ["BundleTokenizer", "Decoder", "StopTexts", "TextStream", "load_tokenizer"]
_REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8


class Decoder(Protocol):
    """What turns tokens into text: a BundleTokenizer, or a tokenizer of the tokenizers library."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of tokens, without special ones."""


class StopTexts:
    """Ends a streamed text in front of whichever of some texts is complete first; what may begin one waits.

    Where two are complete with the same character the longer one counts, so that how the text was cut into pieces
    never shows.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """What can be shown now, and whether the text has ended."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def flush(self) -> str:
        """What was held back, once no more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that is the beginning of the stop text, in characters."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """Feeds tokens in, gives finished text out; bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int] = ()) -> None:
        """prompt: tokens in front; some tokenizers drop the space of a text's first word, so the text must not begin
        with what is generated."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Text that this token completes; may be empty."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        # Decode from the last shown piece on, so that the cost per token stays constant.
        self._start, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, replacement characters included."""
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        self._start = self._shown = len(self._tokens)
        return now[len(before) :]
