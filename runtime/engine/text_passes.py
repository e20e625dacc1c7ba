"""Passes over the tokens of several texts: as many tokens at once as a pass may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from .engine import Engine


@dataclass(frozen=True, slots=True)
class TextPart:
    """Tokens to compute in one slot. first: position of the first one; the slot holds the tokens before it."""

    slot: int
    tokens: Sequence[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """The tokens of one text in a pass.

    which: index of the TextPart.
    first: position of the first token.
    rows: rows of the pass, int [n].
    """

    which: int
    first: int
    rows: np.ndarray


def text_passes(engine: Engine, parts: Sequence[TextPart]) -> Iterator[tuple[list[ComputedPart], np.ndarray]]:
    """Run texts in passes of at most MAX_PASS_TOKENS tokens.

    Yields for each pass the parts of texts that it computed, and the residual stream [T, D].
    """
    tokens: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    computed: list[ComputedPart] = []
    for which, text in enumerate(parts):
        start, count = 0, len(text.tokens)
        while start < count:
            taken = min(count - start, MAX_PASS_TOKENS - len(tokens))
            first = text.first + start
            computed.append(ComputedPart(which, first, np.arange(len(tokens), len(tokens) + taken)))
            tokens += text.tokens[start : start + taken]
            slots += [text.slot] * taken
            positions += range(first, first + taken)
            start += taken
            if len(tokens) == MAX_PASS_TOKENS:
                yield computed, engine.step(tokens, slots, positions)
                tokens, slots, positions, computed = [], [], [], []
    if tokens:
        yield computed, engine.step(tokens, slots, positions)
