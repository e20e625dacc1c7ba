"""Many sequences at the same time: greedy generation for evaluation, with drafts verified in one pass.

A draft is a guess of the answer. One pass over prompt and draft gives the greedy token at every position. As long as
they agree, the draft is the greedy answer. Decoding continues at the first difference.
Every row of a pass depends only on its own sequence. So the answer is the one of decoding token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from .engine import Engine
from .slots import common_length


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


STOP_WINDOW_TOKENS = 16
"""Number of last tokens whose text is searched for stop texts."""


@dataclass(slots=True)
class RunningSequence:
    """One sequence in progress.

    index: index of its prompt in the call.
    prompt: after it has begun, the first tokens of the decoder's text.
    limit: most new tokens.
    produced: greedy tokens so far.
    """

    index: int
    prompt: list[int]
    draft: list[int]
    limit: int
    stop: Sequence[str] = ()
    produced: list[int] = field(default_factory=list)
    slot: int = -1
    has_ended: bool = False

    @property
    def is_finished(self) -> bool:
        """True if the sequence gets no more tokens."""
        return self.has_ended or len(self.produced) >= self.limit


def generate_many(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    limits: Sequence[int],
    take: Callable[[int, list[int]], None] | None = None,
    stops: Sequence[Sequence[str]] | None = None,
    divides: bool = False,
) -> list[list[int]]:
    """Return the greedy answers without eos, in the order of the prompts.

    drafts: one per prompt; empty for none. They are left out once most of their tokens proved wrong. Lossy modes ignore
        them: a pass that checks a draft decides as for a prompt.
    limits: most new tokens of each answer.
    take: called with the index and the tokens of each answer, as soon as it is finished.
    stops: texts that end each answer. The token that completes such a text is the last one.
    divides: have as many slots as these texts let fit, instead of those of the options.
    Raises ContextOverflow if a prompt does not fit.
    Raises InputError if a prompt is empty, or an id is outside the vocabulary.
    """
    stops = [()] * len(prompts) if stops is None else stops
    if not engine.is_exact:
        drafts = [()] * len(prompts)
    for prompt, draft in zip(prompts, drafts, strict=True):
        engine.check_tokens(prompt)
        engine.check_vocabulary(draft)
    with engine.exclusive, ExitStack() as opened:
        waiting = []
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(drafts[i]))
        for i in reversed(order):
            limit = engine.new_tokens_limit(prompts[i], limits[i])
            draft = list(drafts[i])[: max(0, limit - 1)]  # not longer than the room that is left
            waiting.append(RunningSequence(i, list(prompts[i]), draft, limit, stops[i]))
        if divides and engine.is_exact and waiting:
            longest = max(len(item.prompt) + item.limit for item in waiting)
            opened.enter_context(engine.divided_slots(min(longest, engine.memory.context)))
        return _Answers(engine, prompts).run(waiting, take)


_SHARED_TOKENS = 16
"""Least tokens at the beginning of all prompts that are computed once and copied."""
JUDGED_TOKENS = 1024
"""Tokens of drafts after which it is known whether drafts pay."""
_PAYING_SHARE = 0.5
"""Share of right tokens from which drafts pay. A token of a prompt takes about half the time of a decoded one."""


class _Answers:
    """The answers of one call.

    shared: tokens at the beginning of all prompts that are computed once.
    holders: slots that hold these tokens. Nothing overwrites them.
    drafted, right: tokens of drafts that were checked, and those that were greedy.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
        self._engine, self._ends, self._holders = engine, _Ends(engine), list[int]()
        self._drafted = self._right = self._shared = 0
        if engine.is_exact and engine.slots.can_reuse and len(prompts) > 1:
            shared = min(common_length(prompts[0], prompt) for prompt in prompts)
            shared = min(shared, min(map(len, prompts)) - 1)
            self._shared = shared if shared >= _SHARED_TOKENS else 0

    def run(
        self, waiting: list[RunningSequence], take: Callable[[int, list[int]], None] | None = None
    ) -> list[list[int]]:
        """Return the answers.

        waiting: sequences whose prompts were checked, the next one last. It becomes empty.
        """
        engine = self._engine
        results: list[list[int]] = [[] for _ in waiting]
        free, running = list(range(engine.options.slots)), list[RunningSequence]()
        while waiting or running:
            admitted = self._admit(waiting, free)
            if admitted:
                self._prefill(admitted)
                running += admitted
            still = []
            for item in running:
                if item.is_finished:
                    results[item.index] = [token for token in item.produced if token not in self._ends.tokens]
                    free.append(item.slot)
                    if take is not None:
                        take(item.index, results[item.index])
                else:
                    still.append(item)
            running = still
            if running and not (waiting and len(free) * 2 >= engine.options.slots):
                for item, token in zip(running, self._next_tokens(running), strict=True):
                    self._ends.add(item, token)
        return results

    def _next_tokens(self, running: Sequence[RunningSequence]) -> list[int]:
        """Return the next greedy token of each sequence."""
        tokens = [item.produced[-1] for item in running]
        slots = [item.slot for item in running]
        positions = [len(item.prompt) + len(item.produced) - 1 for item in running]
        if self._engine.is_exact:
            return self._greedy(self._engine.step(tokens, slots, positions))
        return list(np.argmax(self._engine.decode(tokens, slots, positions), axis=1).tolist())

    def _greedy(self, hidden: np.ndarray) -> list[int]:
        """Return the likeliest next token of each row, [T, D], as many at once as there is memory for logits."""
        tokens = list[int]()
        for start in range(0, len(hidden), self._engine.logits_rows):
            rows = hidden[start : start + self._engine.logits_rows]
            tokens += np.argmax(self._engine.model.logits(rows), axis=1).tolist()
        return tokens

    def _admit(self, waiting: list[RunningSequence], free: list[int]) -> list[RunningSequence]:
        admitted: list[RunningSequence] = []
        tokens = 0
        if self._drafted >= JUDGED_TOKENS and self._right < _PAYING_SHARE * self._drafted:
            for item in waiting:
                item.draft = []
        while waiting and free:
            need = len(waiting[-1].prompt) - self._shared + len(waiting[-1].draft)
            if admitted and tokens + need > MAX_PASS_TOKENS:
                break
            item = waiting.pop()
            item.slot = free.pop()
            tokens += need
            admitted.append(item)
        return admitted

    def _prefill(self, items: list[RunningSequence]) -> None:
        """Run prompts and drafts. Keeps the part of each draft that is right, and the first token after it."""
        engine = self._engine
        if not self._holders:
            engine.begin_sequence()
        texts = engine.begin_texts([item.slot for item in items], [item.prompt for item in items])
        for item, text in zip(items, texts, strict=True):
            item.prompt = text
            if self._shared:
                self._take_shared(item)
            elif item.draft:
                engine.kv.keep(item.slot, len(item.prompt))
        parts = [TextPart(item.slot, (item.prompt + item.draft)[self._shared :], self._shared) for item in items]
        for computed_parts, hidden in text_passes(engine, parts):
            for computed in computed_parts:
                item = items[computed.which]
                predicting = [row for row in range(len(computed.rows)) if computed.first + row >= len(item.prompt) - 1]
                if predicting:
                    greedy = self._greedy(hidden[computed.rows[predicting]])
                    _accept(item, computed.first + predicting[0], greedy, self._ends)
        for item in items:
            self._drafted += len(item.draft)
            self._right += common_length(item.draft, item.produced)
        self._go_back([item for item in items if item.draft and not item.is_finished])

    def _go_back(self, items: Sequence[RunningSequence]) -> None:
        """Bring recurrent states back from the ends of drafts to the tokens that were right."""
        usable = self._engine.kv.usable
        parts = list[TextPart]()
        for item in items:
            text = item.prompt + item.produced[:-1]
            first = usable(item.slot, len(text))
            parts.append(TextPart(item.slot, text[first:], first))
        for _ in text_passes(self._engine, parts):
            pass

    def _take_shared(self, item: RunningSequence) -> None:
        """Let the slot of a sequence hold the tokens that all prompts begin with."""
        if not self._holders:
            for _ in text_passes(self._engine, [TextPart(item.slot, item.prompt[: self._shared])]):
                pass
        elif item.slot not in self._holders:
            slots = self._engine.slots.slots
            self._engine.copy_prefix(slots[self._holders[0]], slots[item.slot], self._shared)
        else:
            return
        self._engine.kv.keep(item.slot, self._shared)
        self._holders.append(item.slot)


class _Ends:
    """The reasons that end an answer before its limit: end tokens and stop texts."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = frozenset(engine.bundle.manifest.model.eos_token_ids)
        self._engine = engine

    def add(self, item: RunningSequence, token: int) -> None:
        """Add the next token to a sequence."""
        item.produced.append(token)
        item.has_ended = token in self.tokens
        if item.stop and not item.has_ended:
            text = self._engine.tokenizer.decode(item.produced[-STOP_WINDOW_TOKENS:])
            item.has_ended = any(stop in text for stop in item.stop)


def _accept(item: RunningSequence, position: int, greedy: list[int], ends: _Ends) -> None:
    """Add greedy tokens to a sequence until one differs from the draft.

    greedy: token i follows the token at `position` + i.
    """
    for offset, token in enumerate(greedy):
        place = position + offset - (len(item.prompt) - 1)
        if place != len(item.produced) or item.is_finished:
            return
        # The row was computed from the draft. It is valid only if the draft equals the produced tokens.
        if place and item.produced[-1] != item.draft[place - 1]:
            return
        ends.add(item, token)


Take: TypeAlias = Callable[[int, np.ndarray], None]
"""Takes the index of a pair, and logits of the next tokens of its answer, float32 [n, V]."""


def forced_logits(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], decodes: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for each pair its index and the logits that predict the tokens of its answer, float32 [A, V].

    The parameters are those of `force_answers`.
    """
    collected: dict[int, list[np.ndarray]] = {}
    for group in force_answers(
        engine, pairs, lambda index, rows: collected.setdefault(index, []).append(rows), decodes
    ):
        for index in group:
            nothing = np.empty((0, engine.model.spec.vocab_size), np.float32)
            yield index, np.concatenate([nothing, *collected.pop(index, [])])


def force_answers(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], take: Take, decodes: bool = False
) -> Iterator[list[int]]:
    """Compute the logits that predict the tokens of each answer. Yields the indices of pairs that are finished.

    Several sequences share a pass. Under lossy modes only the prompts do, and the answers run token by token.
    pairs: (prompt ids, answer ids).
    take: called with the logits as they are computed, in the order of the answer.
    decodes: run the answers token by token in any case.
    """
    run_group = _force_decoded if decodes or not engine.is_exact else _force_together
    group: list[int] = []
    tokens = 0
    for index, (prompt, answer) in enumerate(pairs):
        need = len(prompt) + len(answer)
        # Plain text is scored after an empty prompt.
        engine.check_pair(prompt, answer)
        if group and (tokens + need > MAX_PASS_TOKENS or len(group) == engine.options.slots):
            with engine.exclusive:
                run_group(engine, pairs, group, take)
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += need
    if group:
        with engine.exclusive:
            run_group(engine, pairs, group, take)
        yield group


def _force_together(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], group: list[int], take: Take
) -> None:
    """Compute the logits of each answer, pass by pass."""
    engine.begin_sequence()
    texts = engine.begin_texts(range(len(group)), [pairs[index][0] for index in group])
    sequences = [TextPart(slot, [*texts[slot], *pairs[index][1]][:-1]) for slot, index in enumerate(group)]
    for parts, hidden in text_passes(engine, sequences):
        for computed in parts:
            predicting = [
                row for row in range(len(computed.rows)) if computed.first + row >= len(texts[computed.which]) - 1
            ]
            for start in range(0, len(predicting), engine.logits_rows):
                chunk = computed.rows[predicting[start : start + engine.logits_rows]]
                take(group[computed.which], engine.model.logits(hidden[chunk]))


def _force_decoded(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], group: list[int], take: Take
) -> None:
    """Compute the logits of each answer token by token, as in a generation."""
    engine.begin_sequence()
    texts = engine.begin_texts(range(len(group)), [pairs[index][0] for index in group])
    answers = [list(pairs[index][1]) for index in group]
    starts = [max(len(text), 1) for text in texts]  # after an empty prompt the first token is not scored
    sequences = [[*text, *answer] for text, answer in zip(texts, answers, strict=True)]
    prompts = [TextPart(at, sequence[: starts[at]]) for at, sequence in enumerate(sequences)]
    for parts, hidden in text_passes(engine, prompts):
        for computed in parts:
            if computed.first + len(computed.rows) == starts[computed.which] < len(sequences[computed.which]):
                take(group[computed.which], engine.model.logits(hidden[computed.rows[-1:]]))
    longest = max((len(sequence) - start for sequence, start in zip(sequences, starts, strict=True)), default=0)
    for step in range(longest - 1):
        running = [at for at, sequence in enumerate(sequences) if starts[at] + step < len(sequence) - 1]
        positions = [starts[at] + step for at in running]
        tokens = [sequences[at][place] for at, place in zip(running, positions, strict=True)]
        logits = engine.decode(tokens, running, positions)
        for row, at in enumerate(running):
            take(group[at], logits[row : row + 1])
