"""The loop that serves the experts of one layer: hits while misses are read, then misses as they arrive.

Every user of a cache runs this loop. `interface.py` drives it with reader threads, `instant_cache.py` with reads that
take no time, `simulation/timeline.py` with simulated time. The extension has its own form in `native/experts/`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from moec.manifests.errors import MemoryBudgetExceeded

LARGER_CACHE = "raise `--memory` or `--expert-cache`"
"""Remedy for an expert that is larger than the cache of a run."""


class ExpertSupply(Protocol):
    """The operations of a cache that the loop needs."""

    def wait_for_some(self, remaining: list[int], all_at_once: bool) -> list[int]:
        """Return the first resident one of the remaining experts; if `all_at_once`, all. Block until there is one."""
        ...

    def unlease(self, indices: Sequence[int]) -> None:
        """Release experts that have been computed, or will not be."""
        ...

    def prefetch(self, indices: Sequence[int]) -> None:
        """Read experts ahead, likeliest first."""
        ...


def serve_layer(
    supply: ExpertSupply,
    hits: list[int],
    misses: list[int],
    look_ahead: Callable[[], Sequence[int]],
    all_at_once: bool,
) -> Generator[list[int], None, None]:
    """Yield each expert of a layer once, when it is resident. It stays leased until the next ones are requested.

    hits: leased experts that are resident.
    misses: the others. Their reads are queued as far as they fit.
    look_ahead: returns the experts likely to be needed next, likeliest first. It is called once, when the reads of this
        layer are under way. If there are hits and misses, it is called after the first hits. Its reads come after those
        of the misses.
    all_at_once: yield all resident experts in one list, else one at a time.
    Raises what `supply` raises. All experts are released in any case.
    """
    hits, misses = list(hits), list(misses)
    looks_after_first_hits = bool(hits and misses)
    try:
        if not looks_after_first_hits:
            _send_advice(supply, look_ahead())
        while hits:
            ready = list(hits) if all_at_once else hits[:1]
            yield ready
            del hits[: len(ready)]
            supply.unlease(ready)
            if looks_after_first_hits:
                _send_advice(supply, look_ahead())
                looks_after_first_hits = False
        while misses:
            ready = supply.wait_for_some(misses, all_at_once)
            yield ready
            misses = [index for index in misses if index not in ready]
            supply.unlease(ready)
    finally:
        if hits or misses:
            supply.unlease([*hits, *misses])


def _send_advice(supply: ExpertSupply, advice: Sequence[int]) -> None:
    """Send advice to the cache, if there is any. It replaces older advice."""
    if advice:
        supply.prefetch(advice)


def too_large_error(size_bytes: int, capacity_bytes: int, remedy: str = LARGER_CACHE) -> MemoryBudgetExceeded:
    """Return the error for an expert that is larger than its cache."""
    return MemoryBudgetExceeded(
        f"an expert of {size_bytes} bytes does not fit into the expert cache of {capacity_bytes}", remedy
    )
