"""Score many continuations of contexts. A context is computed once, and slots run at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypeAlias

import numpy as np

from moec.manifests.errors import ContextOverflow, InputError
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.profiles.memory_floor import LOGITS_ROWS_PER_SLOT

from .answer_scores import AnswerTotal, next_token_scores, score_answers
from .engine import Engine
from .slots import Slot, SlotPool, common_length
from .text_passes import TextPart, text_passes

Group: TypeAlias = tuple[Sequence[int], Sequence[Sequence[int]]]
"""Token ids of a context, and of each continuation."""

_SHARED_TOKENS = 16
"""A context waits for the next pass if it can then copy so many tokens more."""


def score_continuations(engine: Engine, groups: Iterable[Group]) -> Iterator[list[AnswerTotal]]:
    """Yield the scores of each group, in their order. Groups are read as they are needed.

    A context is computed once. Its beginning is not computed again if a slot holds it. Under lossy modes, and with an
    encoder, every continuation is computed after its own context, as `moec eval` does. A continuation without tokens
    has the score 0.
    Raises InputError for an empty context or an id outside the vocabulary, ContextOverflow.
    """
    read = ((list(context), continuations) for context, continuations in groups)
    return _SharedContexts(engine).run(read) if _shares(engine) else _separately(engine, read)


def _shares(engine: Engine) -> bool:
    """Return whether keys and values depend on nothing but the tokens before, so that they may be used again."""
    routers = [layer.experts.router for layer in engine.model.spec.layers]
    has_own_rows = not any(router.capacity for router in routers)
    return engine.is_lossless and engine.model.spec.encoder is None and has_own_rows


def _separately(engine: Engine, groups: Iterable[Group]) -> Iterator[list[AnswerTotal]]:
    for context, continuations in groups:
        if not context:
            raise InputError("a context to score after is empty", "give it at least one token")
        found = dict(score_answers(engine, [(context, each) for each in continuations]))
        yield [found[at] for at in range(len(continuations))]


@dataclass(slots=True)
class _Running:
    """A group in progress.

    slot: holds the context, or will do so.
    kept: tokens of the context that the slot has.
    left: indices of continuations of several tokens that were not computed.
    """

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]
    slot: Slot
    kept: int
    scores: list[AnswerTotal] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def take_context(self, logits: np.ndarray) -> None:
        """Score the first token of every continuation. logits: float32 [V], after the context."""
        firsts = [tokens[0] for tokens in self.continuations if tokens]
        first_scores = iter(next_token_scores(logits, firsts))
        for at, tokens in enumerate(self.continuations):
            self.scores.append(next(first_scores) if tokens else AnswerTotal())
            if len(tokens) > 1:
                self.left.append(at)


class _SharedContexts:
    """Scores groups with shared contexts. One object is for one call."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._sequence = engine, 0
        self._pool = SlotPool(engine.options.slots, can_reuse=True)
        self._rows = LOGITS_ROWS_PER_SLOT * engine.options.slots

    def run(self, groups: Iterator[Group]) -> Iterator[list[AnswerTotal]]:
        """Yield the scores of each group."""
        waiting = next(groups, None)
        while waiting is not None:
            batch: list[_Running] = []
            with self._engine.exclusive:
                self._take_engine()
                while waiting is not None and self._has_room(batch, waiting[0]):
                    batch.append(self._placed(*waiting))
                    waiting = next(groups, None)
                self._compute_contexts(batch)
                while any(each.left for each in batch):
                    self._compute_continuations(batch)
            for each in batch:
                self._pool.release(each.slot)
                yield each.scores

    def _take_engine(self) -> None:
        """Begin a sequence of the engine. If another caller has used it since, its slots hold other texts."""
        number = self._engine.begin_sequence()
        if number != self._sequence + 1:
            for slot in self._pool.slots:
                self._pool.forget(slot)
        self._sequence = number

    def _has_room(self, batch: Sequence[_Running], context: Sequence[int]) -> bool:
        """Return whether a group may join a batch. One that shares much with the batch can copy it afterwards."""
        if not batch:
            return True
        kept, _ = self._pool.longest(context)
        shared = max(common_length(each.context, context) for each in batch)
        tokens = sum(len(each.context) - each.kept for each in batch) + len(context) - kept
        return (
            bool(self._pool.free)
            and tokens <= MAX_PASS_TOKENS
            and min(shared, len(context) - 1) < kept + _SHARED_TOKENS
        )

    def _placed(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> _Running:
        """Give a group a slot, with as much of its context as any slot holds. Raises InputError, ContextOverflow."""
        engine, longest = self._engine, max(map(len, continuations), default=0)
        engine.check_tokens(context, room=0)
        for tokens in continuations:
            engine.check_vocabulary(tokens)
        if len(context) + longest - 1 > engine.memory.context:  # the last token predicts nothing
            raise ContextOverflow(
                f"a context of {len(context)} tokens and its continuation of {longest} exceed the "
                f"{engine.memory.context} positions of the run",
                "shorten them or raise `--context`",
            )
        placement = self._pool.place(context)
        if placement is None:
            raise AssertionError("a group has a slot")
        if placement.source is not None:
            engine.copy_prefix(placement.source.index, placement.slot.index, placement.kept)
        return _Running(context, continuations, placement.slot, placement.kept)

    def _compute_contexts(self, batch: Sequence[_Running]) -> None:
        parts = [TextPart(each.slot.index, each.context[each.kept :], each.kept) for each in batch]
        for computed, hidden in text_passes(self._engine, parts):
            ended = [part for part in computed if part.first + len(part.rows) == len(batch[part.which].context)]
            if ended:
                logits = self._engine.model.logits(hidden[[part.rows[-1] for part in ended]])
                for part, row in zip(ended, logits, strict=True):
                    batch[part.which].take_context(row)
        for each in batch:
            each.slot.held = list(each.context)

    def _compute_continuations(self, batch: Sequence[_Running]) -> None:
        """Compute one continuation in the slot of each group, and others in slots that are free."""
        running = [each for each in batch if each.left]
        placed = [(each, each.slot, each.left.pop()) for each in running]
        free = sorted((slot for slot in self._pool.slots if slot.is_free), key=lambda slot: slot.used, reverse=True)
        for each in cycle(running):
            if not free or not any(other.left for other in running):
                break
            if each.left:
                placed.append((each, self._copied(each, free.pop()), each.left.pop()))
        parts = [TextPart(slot.index, each.continuations[at][:-1], len(each.context)) for each, slot, at in placed]
        for computed, hidden in text_passes(self._engine, parts):
            for part in computed:
                each, _, at = placed[part.which]
                start = part.first - len(each.context) + 1
                for first in range(0, len(part.rows), self._rows):
                    rows = part.rows[first : first + self._rows]
                    targets = each.continuations[at][start + first : start + first + len(rows)]
                    each.scores[at].add(self._engine.model.logits(hidden[rows]), targets)

    def _copied(self, each: _Running, slot: Slot) -> Slot:
        """Copy a context to a slot. What the slot held is lost."""
        self._engine.copy_prefix(each.slot.index, slot.index, len(each.context))
        slot.held = list(each.context)
        return slot
