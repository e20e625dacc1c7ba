"""Bytes that a replay under HOBBIT's score reads: the decisions of `replay`, without the objects of a cache.

A fit of weights replays the same texts a hundred times. `replay.py` is the specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.eviction import eviction_order
from ..expert_cache.policies import MultidimensionalScore
from ..expert_cache.serve_layer import too_large_error
from ..storage.read_runs import NONE, ReadRuns
from ..trace.trace import Access
from .replay import REMEDY, replay


def replayed_bytes(trace: Sequence[Access], spec: CacheSpec, score: MultidimensionalScore, warm: Sequence[int]) -> int:
    """Return `replay(...).bytes_read`. The parameters and errors are those of `replay`."""
    runs = ReadRuns(spec.sizes.tolist(), [NONE] * len(spec.sizes))
    # One access may keep the readers so busy that further reads are queued later.
    waits = any(map(runs.keep_busy, {experts for _, experts in trace}))
    if spec.records.encoder_layers or spec.records.expert is not None or waits:
        return replay(trace, spec, score, warm).bytes_read
    cache = _Cache(spec, score)
    cache.fill(warm)
    for layer, experts in trace:
        cache.serve(layer, experts)
    return cache.bytes_read


class _Cache:
    """Experts in memory, as in InstantCache without advice. A number of bytes is all that is counted."""

    def __init__(self, spec: CacheSpec, score: MultidimensionalScore) -> None:
        count = len(spec.sizes)
        self._records, self._score = spec.records.unused(), score
        self._sizes: list[int] = spec.sizes.tolist()
        self._capacity, self._used, self._clock, self.bytes_read = spec.capacity_bytes, 0, 0, 0
        # Single values are faster in bytes and views, orders in arrays. Both share their memory.
        self._is_resident = bytearray(size == 0 for size in self._sizes)
        self._is_evictable = bytearray(count)  # resident, stored and not leased
        self._evictable = np.frombuffer(self._is_evictable, np.uint8)
        self._last_used, self._uses = self._records.last_used.data, self._records.uses.data

    def fill(self, indices: Sequence[int]) -> None:
        """Fill free capacity in the given order."""
        for index in indices:
            if not self._is_resident[index] and self._used + self._sizes[index] <= self._capacity:
                self._used += self._sizes[index]
                self._is_resident[index] = self._is_evictable[index] = 1

    def serve(self, layer: int, experts: Sequence[int]) -> None:
        """Serve one layer of one pass. Raises MemoryBudgetExceeded if an expert does not fit."""
        self._clock += 1
        for index in experts:
            self._last_used[index] = self._clock
            self._uses[index] += 1
        missing = [index for index in experts if not self._is_resident[index]]
        if not missing:
            return
        self._records.clock = self._clock
        hits = [index for index in experts if self._is_evictable[index]]
        for index in hits:  # they are leased while the first reads are queued
            self._is_evictable[index] = 0
        self._read(layer, missing)
        for index in hits:
            self._is_evictable[index] = 1
        while missing:
            self._read(layer, [index for index in missing if not self._is_resident[index]])
            served = next((index for index in missing if self._is_resident[index]), None)
            if served is None:
                raise too_large_error(self._sizes[missing[0]], self._capacity, REMEDY)
            missing.remove(served)
            self._is_evictable[served] = 1

    def _read(self, layer: int, waiting: Sequence[int]) -> None:
        """Read the waiting experts until one does not fit. They stay leased."""
        victims: Iterator[int] | None = None  # first to evict first; the order is computed when it is needed
        for index in waiting:
            lacking, taken = self._used + self._sizes[index] - self._capacity, list[int]()
            while lacking > 0:
                if victims is None:
                    evictable = np.flatnonzero(self._evictable)
                    victims = iter(eviction_order(self._records, self._score, layer, evictable).tolist())
                victim = next(victims, None)
                if victim is None:
                    return
                taken.append(victim)
                lacking -= self._sizes[victim]
            for victim in taken:
                self._is_resident[victim] = self._is_evictable[victim] = 0
                self._used -= self._sizes[victim]
            self._used += self._sizes[index]
            self.bytes_read += self._sizes[index]
            self._is_resident[index] = 1
