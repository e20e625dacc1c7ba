"""Fit the weights of HOBBIT's score by a small deterministic search, and count the bytes that a replay under it reads.

A fit replays the same texts a hundred times. So `replayed_bytes` makes the decisions of `replay` without the objects of
a cache. `replay.py` is the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import numpy as np

from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.eviction import eviction_order
from ..expert_cache.policies import MultidimensionalScore
from ..expert_cache.serve_layer import too_large_error
from ..options.runtime import EvictionWeights
from ..storage.read_runs import NONE, ReadRuns
from ..trace.trace import Access
from .replay import REMEDY, replay

# Weights are multiples of 1 / UNITS. The first grid has steps of 1/4; the step is halved until it is one unit.
UNITS = 32
_FIRST_STEP = UNITS // 4
Point = tuple[int, int, int, int]
"""Units of recency, uses, uses at high precision and nearness; their sum is UNITS."""


def fit_weights(
    penalty: Callable[[EvictionWeights], float], has_low_versions: bool = False
) -> tuple[EvictionWeights, float]:
    """Return the weights with the smallest penalty that the search visits, and this penalty.

    The search tries recency, uses and nearness in steps of 1/4. Then it moves 1/8, 1/16 and 1/32 from one weight to
    another as long as the penalty falls. On ties the first tried point is taken. It makes at most a few dozen calls.
    penalty: must be deterministic.
    has_low_versions: also search the weight of uses at high precision, which takes two or three times the calls. If
        experts have one precision, these uses equal all uses.
    """
    known: dict[Point, float] = {}

    def tried(point: Point) -> float:
        if point not in known:
            known[point] = penalty(_weights(point))
        return known[point]

    best = min(_grid(has_low_versions), key=tried)
    step = _FIRST_STEP // 2
    while step:
        neighbours = list[Point]()  # `step` units move from one weight to another
        for taken, given in permutations((0, 1, 2, 3) if has_low_versions else (0, 1, 3), 2):
            if best[taken] >= step:
                moved = list(best)
                moved[taken] -= step
                moved[given] += step
                neighbours.append((moved[0], moved[1], moved[2], moved[3]))
        nearest = min(neighbours, key=tried)
        if tried(nearest) < tried(best):
            best = nearest
        else:
            step //= 2
    return _weights(best), known[best]


def _grid(has_low_versions: bool) -> Iterator[Point]:
    steps = UNITS // _FIRST_STEP
    for lru in range(steps + 1):
        for lfu in range(steps + 1 - lru):
            for lhu in range(steps + 1 - lru - lfu) if has_low_versions else (0,):
                yield lru * _FIRST_STEP, lfu * _FIRST_STEP, lhu * _FIRST_STEP, (steps - lru - lfu - lhu) * _FIRST_STEP


def _weights(point: Point) -> EvictionWeights:
    lru, lfu, lhu, fld = (units / UNITS for units in point)
    return EvictionWeights(lru, lfu, lhu, fld)


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
