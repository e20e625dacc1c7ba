"""Stream text without splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8


class Decoder(Protocol):
    """Turns tokens into text: a BundleTokenizer, or a tokenizer of the tokenizers library."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of tokens, without special ones."""


class StopTexts:
    """Ends a streamed text before the first complete stop text. Text that may begin a stop text is held back.

    If two stop texts are complete with the same character, the longer one counts.
    So the result does not depend on the pieces in which the text arrives.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Add a piece. Returns the text that can be shown now, and whether the text has ended."""
        shown, stop_text = self.push_found(piece)
        return shown, stop_text is not None

    def push_found(self, piece: str) -> tuple[str, str | None]:
        """Add a piece. Returns the text that can be shown now, and the stop text that ends it, or None."""
        text = self._held + piece
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, start = min(matches)
            return text[:start], text[start:end]
        held_characters = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held_characters :]
        return text[: len(text) - held_characters], None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        waiting, self._held = self._held, ""
        return waiting


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that is a beginning of stop, in characters."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """Turns tokens into finished text. Bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int] = ()) -> None:
        """prompt: tokens before the generated ones.

        Some tokenizers drop the space of a text's first word, so the decoded text
        must begin before the generated part.
        """
        self._tokenizer = tokenizer
        self._tokens: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes; may be empty."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        # Decode from the last shown piece, so that the cost per token stays constant.
        self._start, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """Return the rest of the text at the end, with replacement characters."""
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        self._start = self._shown = len(self._tokens)
        return now[len(before) :]
