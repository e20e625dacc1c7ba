"""Requests that have a slot, the passes of the engine over them, and the counts of a running server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.runtime.engine.engine import Engine
from moec.runtime.engine.slots import Placement
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.text.sampling import Sampler, TokenLogProb, token_log_prob
from moec.runtime.text.streaming_text import StopTexts, TextStream

from .request import Ended, FinishReason, GenerationRequest, PromptScored, Timings, TokenMade


class RunningSequence:
    """One request between its slot and its last token.

    known: tokens of the decoder's text so far. Those after the slot's `tokens` have not been computed.
    prompt_length: number of tokens in `known` before the answer.
    has_ended: the last event was delivered.
    """

    def __init__(
        self, engine: Engine, request: GenerationRequest, placement: Placement, text: list[int], activity: Activity
    ) -> None:
        """text: first tokens of the decoder's text.

        activity: counts tokens and ends.
        """
        self.request, self.slot = request, placement.slot
        self.known, self.prompt_length = list(text), len(text)
        self.has_ended = False
        self._engine, self._activity = engine, activity
        self._sampler = Sampler(request.sampling)
        self._mask = request.mask
        self._stream, self._stop = TextStream(engine.tokenizer, text), StopTexts(request.stop)
        self._ends = frozenset(engine.bundle.manifest.model.eos_token_ids)
        self._limit = engine.new_tokens_limit(request.tokens, request.max_new_tokens)
        self._scores: list[TokenLogProb] = []
        self._characters = 0
        self._reused, self._started_ns = placement.reused, time.perf_counter_ns()
        self._first_ns: int | None = None
        self._last_ns = self._passes_ns = 0
        self._cache = CacheStats()

    @property
    def is_prefilling(self) -> bool:
        """True until all tokens of the prompt have been computed."""
        return len(self.slot.tokens) < self.prompt_length

    @property
    def waiting_tokens(self) -> int:
        """Number of known tokens that have not been computed."""
        return len(self.known) - len(self.slot.tokens)

    def logits_rows(self, count: int) -> range:
        """Return which of the next `count` tokens need logits."""
        start = len(self.slot.tokens)
        if self.request.scores_prompt and start < self.prompt_length:
            return range(count)
        return range(count - 1, count) if start + count == len(self.known) else range(0)

    def add_pass(self, elapsed_ns: int, cache: CacheStats) -> None:
        """Count a pass that the request took part in."""
        self._passes_ns += elapsed_ns
        self._cache = self._cache.plus(cache)

    def advance(self, count: int) -> None:
        """Note that the next `count` tokens were computed."""
        start = len(self.slot.tokens)
        self.slot.tokens += self.known[start : start + count]

    def take_row(self, position: int, logits: np.ndarray) -> None:
        """Take the logits after the token at a position: score the prompt's next token, or choose a token.

        Raises ExecutionError for logits that are no numbers.
        """
        if self.has_ended:
            return
        if position + 1 < self.prompt_length:
            self._scores.append(token_log_prob(logits, self.known[position + 1], self.request.log_probs or 0))
            return
        if self.request.scores_prompt and position + 1 == self.prompt_length:
            self.request.deliver(PromptScored(tuple(self._scores)))
        if self.request.max_new_tokens == 0:
            self._end("length", None)
            return
        self._add_token(logits)

    def _add_token(self, logits: np.ndarray) -> None:
        token = self._sampler(self._allowed(logits), self.known, self.prompt_length)
        asked = self.request.log_probs
        log_prob = None if asked is None else token_log_prob(logits, token, asked)
        self.known.append(token)
        self._last_ns = time.perf_counter_ns()
        self._activity.answer_tokens += 1
        if self._first_ns is None:
            self._first_ns = self._last_ns
            self._activity.add_first_token(self._first_ns - self.request.arrived_ns)
        is_end, count = token in self._ends, len(self.known) - self.prompt_length
        is_complete = self._mask is not None and self._mask.take(token)
        reason: FinishReason | None = "stop" if is_end or is_complete else ("length" if count >= self._limit else None)
        text = "" if is_end else self._stream.push(token) + self.request.marks.get(token, "")
        text += "" if reason is None else self._stream.flush()
        start, self._characters = self._characters, self._characters + len(text)
        shown, stop_text = self._stop.push_found(text)
        if stop_text is not None:
            reason = "stop"
        elif reason is not None:
            shown += self._stop.flush()
        self.request.deliver(TokenMade(token, shown, log_prob, start))
        if reason is not None:
            self._end(reason, stop_text)

    def _allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return logits in which tokens that the answer's mask forbids are impossible. Other rows are not touched."""
        allowed = None if self._mask is None else self._mask.allowed()
        return logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))

    def _end(self, reason: FinishReason, stop_text: str | None) -> None:
        self.has_ended = True
        self._activity.add_end(reason)
        self.request.deliver(Ended(reason, stop_text, self._timings()))

    def _timings(self) -> Timings:
        count, arrived = len(self.known) - self.prompt_length, self.request.arrived_ns
        first = self._first_ns
        return Timings(
            prompt_tokens=len(self.request.tokens),
            answer_tokens=count,
            cached_tokens=self._reused,
            queue_ns=self._started_ns - arrived,
            ttft_ns=None if first is None else first - arrived,
            tpot_ns=(self._last_ns - first) / (count - 1) if first is not None and count > 1 else None,
            lookups=self._cache.lookups,
            hits=self._cache.hits,
            bytes_read=self._cache.bytes_read,
            stall_ns=self._cache.stall_ns,
            running_ns=self._passes_ns,
        )


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
        self._rows = engine.logits_rows
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


@dataclass(slots=True)
class Activity:
    """Counts since the start, for the live feed and the metrics. The engine's thread writes, other threads read.

    passes, running_ns: passes and their time.
    prompt_tokens, cached_tokens: tokens of prompts, and those of them that were in memory.
    answer_tokens: tokens of answers.

    requests: requests by how they ended: `stop`, `length`, `cancelled`, `deadline_exceeded`, `failed`, `refused`.
    ttft_ns: time to the first token of the last answer; None before the first one.
    ttft_sum_ns, ttft_count: sum and number of times to the first token.
    cache: counts of the expert cache over all passes.
    """

    passes: int = 0
    running_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    ttft_ns: int | None = None
    ttft_sum_ns: int = 0
    ttft_count: int = 0
    cache: CacheStats = field(default_factory=CacheStats)

    def add_pass(self, elapsed_ns: int, cache: CacheStats) -> None:
        self.passes += 1
        self.running_ns += elapsed_ns
        self.cache = self.cache.plus(cache)

    def add_first_token(self, elapsed_ns: int) -> None:
        """Count the first token of an answer. elapsed_ns: time since the request arrived."""
        self.ttft_ns = elapsed_ns
        self.ttft_sum_ns += elapsed_ns
        self.ttft_count += 1

    def add_end(self, how: str) -> None:
        self.requests[how] = self.requests.get(how, 0) + 1
