"""InstantCache: a cache whose reads take no time, for decisions that must not depend on the end of a read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .serve_layer import LARGER_CACHE, serve_layer
from .simulated_cache import SimulatedCache


class InstantCache(SimulatedCache):
    """A SimulatedCache with the loop of a real cache, in which each queued read ends at once."""

    remedy = LARGER_CACHE
    """Hint for an expert that is larger than the cache."""

    def serve(
        self,
        layer: int,
        experts: Sequence[int],
        advice: Sequence[int] = (),
        next_use: np.ndarray | None = None,
        all_at_once: bool = True,
    ) -> None:
        """Serve one layer of one pass.

        advice: experts to read ahead, likeliest first.
        next_use: position of the next access of each expert, int64 [len(experts)]. Only the optimum needs it.
        all_at_once: whether all resident experts are computed at once, as those of a single token are.
        Raises MemoryBudgetExceeded if an expert does not fit.
        """
        hits, misses = self.request(layer, experts, next_use)
        self.queue_and_lease(misses)
        self.end_reads()
        for _ in serve_layer(self, hits, misses, lambda: advice, all_at_once):
            pass  # computing takes no time

    def prefetch(self, indices: Sequence[int]) -> None:
        """Read experts ahead, likeliest first, as far as free memory and the pin limit allow. Replaces older advice."""
        self.advise(indices)
        self.end_reads()

    def wait_for_some(self, remaining: list[int], all_at_once: bool) -> list[int]:
        """Return the first remaining expert that is resident; if `all_at_once`, all that are.

        Raises MemoryBudgetExceeded if there is none, because no read could begin.
        """
        self.queue_and_lease(remaining)
        self.end_reads()
        ready = self.ready(remaining)
        if not ready:
            raise self.too_large_error(remaining[0], self.remedy)
        return ready if all_at_once else ready[:1]

    def end_reads(self) -> None:
        """End every queued read."""
        while run := self.next_read():
            for index in run:
                self.arrive(index)
