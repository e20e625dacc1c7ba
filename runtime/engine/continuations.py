"""Score given answers, and many continuations of contexts.

The score is the sum of log probabilities of the tokens, and whether greedy decoding gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypeAlias

import numpy as np

from moec.manifests.errors import ContextOverflow, ExecutionError, InputError
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..text.sampling import shifted_and_total
from .batch import TextPart, force_answers, text_passes
from .engine import Engine
from .slots import Slot, common_length


@dataclass(slots=True)
class AnswerTotal:
    """The score of the tokens of an answer so far.

    log_prob: sum of log p over its tokens, in nats.
    is_greedy: whether each token is the likeliest one at its place. Of equal ones, that is the lowest id.
    tokens: number of tokens.
    """

    log_prob: float = 0.0
    is_greedy: bool = True
    tokens: int = 0

    def add(self, logits: np.ndarray, targets: Sequence[int]) -> None:
        """Add the next tokens.

        logits: float32 [n, V].
        targets: n token ids.
        Raises ExecutionError for logits that are no numbers.
        """
        shifted, total = _checked(logits)
        self.log_prob += float((shifted[np.arange(len(targets)), list(targets)] - total).sum())
        self.is_greedy = self.is_greedy and bool((shifted.argmax(axis=1) == targets).all())
        self.tokens += len(targets)


def next_token_scores(logits: np.ndarray, tokens: Sequence[int]) -> list[AnswerTotal]:
    """Return the score of each of several next tokens. logits: float32 [V]. Raises ExecutionError as `AnswerTotal`."""
    (shifted,), (total,) = _checked(logits[None])
    likeliest = int(shifted.argmax())
    return [AnswerTotal(float(shifted[token] - total), token == likeliest, 1) for token in tokens]


def score_answers(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], decodes: bool = False
) -> Iterator[tuple[int, AnswerTotal]]:
    """Yield for each pair its index and the score of its answer. Logits are used as they are computed, and not kept.

    The parameters are those of `force_answers`. After an empty prompt the first token is not scored.
    """
    totals: dict[int, AnswerTotal] = {}

    def take(index: int, logits: np.ndarray) -> None:
        prompt, answer = pairs[index]
        total = totals[index]
        start = total.tokens + (not prompt)
        total.add(logits, answer[start : start + len(logits)])

    totals.update((index, AnswerTotal()) for index in range(len(pairs)))
    for group in force_answers(engine, pairs, take, decodes):
        for index in group:
            yield index, totals.pop(index)


def _checked(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not np.isfinite(logits.max(axis=1)).all():
        raise ExecutionError("the logits hold NaN or infinity", "check the bundle with `moec verify`")
    return shifted_and_total(logits)


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
    if engine.is_exact and engine.slots.can_reuse:
        yield from _SharedContexts(engine).run(read)
        return
    for context, continuations in read:
        if not context:
            raise InputError("a context to score after is empty", "give it at least one token")
        scores = dict(score_answers(engine, [(context, continuation) for continuation in continuations]))
        yield [scores[at] for at in range(len(continuations))]


@dataclass(slots=True)
class _Running:
    """A group in progress.

    slot: holds the context, or will do so.
    reused: tokens of the context that the slot has.
    left: indices of continuations of several tokens that were not computed.
    """

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]
    slot: Slot
    reused: int
    scores: list[AnswerTotal] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


class _SharedContexts:
    """Scores groups with shared contexts. One object is for one call."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pool = engine, engine.slots
        self._rows = engine.logits_rows

    def run(self, groups: Iterator[Group]) -> Iterator[list[AnswerTotal]]:
        """Yield the scores of each group."""
        waiting = next(groups, None)
        while waiting is not None:
            batch: list[_Running] = []
            with self._engine.exclusive:
                self._engine.begin_sequence(keeps_slots=True)
                while waiting is not None and self._has_room(batch, waiting[0]):
                    batch.append(self._placed(*waiting))
                    waiting = next(groups, None)
                self._compute_contexts(batch)
                while any(group.left for group in batch):
                    self._compute_continuations(batch)
            for group in batch:
                yield group.scores

    def _has_room(self, batch: Sequence[_Running], context: Sequence[int]) -> bool:
        """Return whether a group may join a batch. One that shares much with the batch can copy it afterwards."""
        if not batch:
            return True
        shared_with_slot, _ = self._pool.longest(context)
        shared = max(common_length(group.context, context) for group in batch)
        tokens = sum(len(group.context) - group.reused for group in batch) + len(context) - shared_with_slot
        return (
            bool(self._pool.free)
            and tokens <= MAX_PASS_TOKENS
            and min(shared, len(context) - 1) < shared_with_slot + _SHARED_TOKENS
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
        if placement.source is not None:
            engine.copy_prefix(placement.source, placement.slot, placement.reused)
        engine.kv.keep(placement.slot.index, len(context))
        return _Running(context, continuations, placement.slot, placement.reused)

    def _compute_contexts(self, batch: Sequence[_Running]) -> None:
        parts = [TextPart(group.slot.index, group.context[group.reused :], group.reused) for group in batch]
        for computed, hidden in text_passes(self._engine, parts):
            ended = [
                ending for ending in computed if ending.first + len(ending.rows) == len(batch[ending.which].context)
            ]
            if ended:
                logits = self._engine.model.logits(hidden[[ending.rows[-1] for ending in ended]])
                for ending, row in zip(ended, logits, strict=True):
                    group = batch[ending.which]
                    first_tokens = [tokens[0] for tokens in group.continuations if tokens]
                    first_scores = iter(next_token_scores(row, first_tokens))
                    group.scores += [next(first_scores) if tokens else AnswerTotal() for tokens in group.continuations]
                    group.left += [at for at, tokens in enumerate(group.continuations) if len(tokens) > 1]
        for group in batch:
            group.slot.tokens = list(group.context)

    def _compute_continuations(self, batch: Sequence[_Running]) -> None:
        """Compute one continuation in the slot of each group, and others in slots that are free."""
        running = [group for group in batch if group.left]
        placed = [(group, group.slot, group.left.pop()) for group in running]
        free = sorted((slot for slot in self._pool.slots if slot.is_free), key=lambda slot: slot.used, reverse=True)
        for group in cycle(running):
            if not free or not any(other.left for other in running):
                break
            if group.left:
                slot = free.pop()  # what it holds is lost
                self._engine.copy_prefix(group.slot, slot, len(group.context))
                placed.append((group, slot, group.left.pop()))
        parts = [TextPart(slot.index, group.continuations[at][:-1], len(group.context)) for group, slot, at in placed]
        for computed, hidden in text_passes(self._engine, parts):
            for computed_part in computed:
                group, _, at = placed[computed_part.which]
                start = computed_part.first - len(group.context) + 1
                for first in range(0, len(computed_part.rows), self._rows):
                    rows = computed_part.rows[first : first + self._rows]
                    targets = group.continuations[at][start + first : start + first + len(rows)]
                    group.scores[at].add(self._engine.model.logits(hidden[rows]), targets)
