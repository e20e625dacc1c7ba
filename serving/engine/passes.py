"""One pass of the engine over several sequences: which tokens take part, and what is left if a pass fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.profiles.memory_floor import LOGITS_ROWS_PER_SLOT
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.cache_stats import CacheStats

from .activity import Activity
from .running import RunningSequence


@dataclass(frozen=True, slots=True)
class Part:
    """The next `count` tokens of one sequence."""

    sequence: RunningSequence
    count: int


Fail = Callable[[RunningSequence, Exception], None]


class PassRunner:
    """Composes and runs passes.

    prefill_tokens: most tokens of prompts in a pass while answers run.
    fail: called with a sequence that cannot go on, and the reason.
    activity: counts passes.
    """

    def __init__(self, engine: Engine, prefill_tokens: int, fail: Fail, activity: Activity) -> None:
        self._engine, self._fail, self._activity = engine, fail, activity
        self._prefill_tokens = prefill_tokens
        self._rows = LOGITS_ROWS_PER_SLOT * engine.options.slots
        routers = [layer.experts.router for layer in engine.model.spec.layers]
        self._divides_prompts = not any(router.capacity for router in routers)

    def run(self, running: Sequence[RunningSequence]) -> None:
        """Run the next pass. Under lossy modes, prompts and tokens take one pass each."""
        prompts = [sequence for sequence in running if sequence.is_prefilling]
        answers = [Part(sequence, 1) for sequence in running if not sequence.is_prefilling]
        chunks = self._chunks(prompts, len(answers))
        if self._engine.is_exact and len(answers) + sum(part.count for part in chunks) <= MAX_PASS_TOKENS:
            self._run_parts([*answers, *chunks])
            return
        for parts in (chunks, answers):
            if parts:
                self._run_parts(parts)

    def _chunks(self, prompts: Sequence[RunningSequence], answers: int) -> list[Part]:
        """Return what is computed of the prompts, first come, first served."""
        left = min(self._prefill_tokens, MAX_PASS_TOKENS - answers) if answers else MAX_PASS_TOKENS
        parts: list[Part] = []
        for sequence in prompts:
            count = min(sequence.waiting_tokens, max(left, 0))
            if not self._divides_prompts:  # as Engine.prefill divides it
                count = min(sequence.waiting_tokens, MAX_PASS_TOKENS)
                if parts and count > left:
                    break
            if count == 0:
                break
            parts.append(Part(sequence, count))
            left -= count
        return parts

    def _run_parts(self, parts: list[Part]) -> None:
        """Run a pass. If it fails, run each sequence alone, so that only those fail that cannot go on."""
        lengths = [len(part.sequence.slot.tokens) for part in parts]
        try:
            self._run_pass(parts)
        except Exception as error:
            for part, before in zip(parts, lengths, strict=True):
                if len(parts) == 1 or len(part.sequence.slot.tokens) != before:  # the second: there were no logits
                    self._fail(part.sequence, error)
                else:
                    self._run_parts([part])

    def _run_pass(self, parts: list[Part]) -> None:
        engine, started_ns, before = self._engine, time.perf_counter_ns(), self._engine.cache.stats.copy()
        tokens, slots, positions = list[int](), list[int](), list[int]()
        wanted: list[tuple[Part, int]] = []
        for part in parts:
            first, known = len(part.sequence.slot.tokens), part.sequence.known
            wanted += [(part, len(tokens) + row) for row in part.sequence.logits_rows(part.count)]
            tokens += known[first : first + part.count]
            slots += [part.sequence.slot.index] * part.count
            positions += range(first, first + part.count)
        if not engine.is_exact and not parts[0].sequence.is_prefilling:
            logits = engine.decode(tokens, slots, positions)
            self._finish(parts, time.perf_counter_ns() - started_ns, before)
            self._take(wanted, positions, logits)
            return
        hidden = engine.step(tokens, slots, positions)
        self._finish(parts, time.perf_counter_ns() - started_ns, before)
        for start in range(0, len(wanted), self._rows):
            group = wanted[start : start + self._rows]
            self._take(group, positions, engine.model.logits(hidden[[row for _, row in group]]))

    def _finish(self, parts: Sequence[Part], elapsed_ns: int, before: CacheStats) -> None:
        """Note what was computed. Nothing after this runs a token again."""
        counts = self._engine.cache.stats.since(before)
        for part in parts:
            part.sequence.advance(part.count)
            part.sequence.add_pass(elapsed_ns, counts)
        self._activity.add_pass(elapsed_ns, counts)

    def _take(self, rows: Sequence[tuple[Part, int]], positions: Sequence[int], logits: np.ndarray) -> None:
        """Hand rows of logits to their sequences. A sequence that cannot use them fails alone."""
        for (part, row), logits_row in zip(rows, logits, strict=True):
            try:
                part.sequence.take_row(positions[row], logits_row)
            except Exception as error:
                self._fail(part.sequence, error)
