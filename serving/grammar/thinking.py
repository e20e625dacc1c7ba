"""A mask for models that think before they answer: the grammar begins after the thinking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moec.runtime.text.streaming_text import Decoder, TextStream

from .masks import TokenMask

OPEN, CLOSE = "<think>", "</think>"


class AfterThinking:
    """Allows all tokens but the end until `</think>`, then those of another mask."""

    def __init__(
        self,
        mask: TokenMask,
        tokenizer: Decoder,
        is_open: bool,
        vocabulary: int,
        ends: Sequence[int],
        opening: int | None = None,
        closing: int | None = None,
    ) -> None:
        """is_open: the prompt has opened the thinking.

        vocabulary: number of token ids.
        ends: tokens that end an answer.
        opening, closing: the tokens `<think>` and `</think>`; None if a vocabulary spells them with several. An answer
            without an opening token does not begin to think.
        """
        self._mask, self._is_open, self._is_first = mask, is_open, not is_open
        self._before_end = np.ones(vocabulary, bool)
        self._before_end[list(ends)] = False
        self._opening, self._closing = opening, closing
        self._stream, self._tail = TextStream(tokenizer), ""

    def allowed(self) -> np.ndarray | None:
        """Return the tokens that may come next, bool [V]."""
        if self._is_open:
            return self._before_end
        allowed = self._mask.allowed()
        if self._is_first and self._opening is not None:
            allowed = allowed.copy()
            allowed[self._opening] = True
        return allowed

    def take(self, token: int) -> bool:
        """Take the next token. Returns whether the answer is complete."""
        is_first, self._is_first = self._is_first, False
        if is_first and token == self._opening:
            self._is_open = True
            return False
        if not self._is_open:
            return self._mask.take(token)
        self._tail = self._tail[-len(CLOSE) :] + self._stream.push(token)
        self._is_open = token != self._closing and CLOSE not in self._tail
        return False
