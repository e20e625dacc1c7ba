"""A request that has a slot: what is known of its text, and how it goes on after a pass."""

from __future__ import annotations

import time

import numpy as np

from moec.runtime.engine.engine import Engine
from moec.runtime.engine.slots import Placement
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.text.sampling import Sampler, TokenLogProb, token_log_prob
from moec.runtime.text.streaming_text import StopTexts, TextStream

from .activity import Activity
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
