"""Counts of a running server, for the live feed and the metrics. The engine's thread writes, other threads read."""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.runtime.expert_cache.cache_stats import CacheStats


@dataclass(slots=True)
class Activity:
    """Counts since the start.

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
        """Count one pass."""
        self.passes += 1
        self.running_ns += elapsed_ns
        self.cache = self.cache.plus(cache)

    def add_first_token(self, elapsed_ns: int) -> None:
        """Count the first token of an answer. elapsed_ns: time since the request arrived."""
        self.ttft_ns = elapsed_ns
        self.ttft_sum_ns += elapsed_ns
        self.ttft_count += 1

    def add_end(self, how: str) -> None:
        """Count the end of a request."""
        self.requests[how] = self.requests.get(how, 0) + 1
