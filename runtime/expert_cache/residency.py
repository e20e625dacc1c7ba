"""Residency: state of each of N experts (absent, queued, loading, resident) and the choice of experts to evict.

ExpertCache and SimulatedCache decide by it. It has no storage, threads or time. The owner begins reads, reports their
end, and holds a lock if several threads call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..storage.read_runs import NONE, ReadRuns
from .cache_spec import CacheSpec
from .cache_stats import CacheStats

ABSENT, QUEUED, LOADING, RESIDENT = range(4)
_FEW = 8
"""Experts that are ordered first for eviction. One request rarely evicts more."""
Order = Callable[[int, np.ndarray, int], np.ndarray]
"""Maps the running layer, candidates, int [C], and a count to this many candidates, first to evict first."""


class Residency:
    """A ledger. Invariant: bytes of queued, loading and resident experts never exceed the capacity.

    spec: an expert of 0 bytes is always resident. Each use is added to the records.
    order: chooses the experts to evict.
    evicted: called with every evicted expert.
    runs: experts that are read together; None: one by one.

    state: int8 [N].
    is_leased: held or awaited by a layer, bool [N].
    is_ahead: read ahead and not requested since, bool [N].
    is_seen: has been in memory, bool [N].

    demand, advice: queued reads, most urgent first.
    prefetches: reads ahead of each expert, and those requested in time, int64 [2, N].

    A predicted expert is pinned until its layer requests experts. Then it is leased, or the prediction was wrong.
    """

    def __init__(
        self,
        spec: CacheSpec,
        order: Order,
        evicted: Callable[[int], None] = lambda index: None,
        runs: ReadRuns | None = None,
    ) -> None:
        count = len(spec.sizes)
        self.sizes: list[int] = spec.sizes.tolist()
        self.capacity_bytes, self.pin_limit_bytes, self.used_bytes = spec.capacity_bytes, spec.pin_limit_bytes, 0
        self._records, self._order, self._evicted = spec.records, order, evicted
        self._is_stored = spec.sizes > 0
        self.state = np.where(self._is_stored, ABSENT, RESIDENT).astype(np.int8)
        self.is_leased = np.zeros(count, bool)
        self.is_ahead = np.zeros(count, bool)
        self.is_seen = np.zeros(count, bool)
        self.prefetches = np.zeros((2, count), np.int64)
        self.demand, self.advice = deque[int](), deque[int]()
        self.stats = CacheStats()
        self._runs = ReadRuns(self.sizes, [NONE] * count) if runs is None else runs
        self._layer_of: list[int] = spec.records.layer.tolist()
        self._pins: list[int] = []
        self._clock = self._layer = 0

    def ask(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Request experts for one layer of one pass. Returns hits, which are leased now, and misses."""
        hits: list[int] = []
        misses: list[int] = []
        self._layer = layer
        self._pins = [index for index in self._pins if self._layer_of[index] != layer]
        for index in [i for i in self.advice if self._layer_of[i] == layer and i not in experts]:  # wrong prediction
            self.advice.remove(index)
            self.withdraw(index)
        self._clock += 1
        self._records.use(experts, self._clock)
        for index in experts:
            if self.state[index] == RESIDENT:
                if self.is_ahead[index]:
                    self.stats.prefetch_hits += 1
                    self.count_use_of_advice(index)
                self.is_leased[index] = True
                hits.append(index)
            else:
                misses.append(index)
        self.stats.lookups += len(experts)
        self.stats.hits += len(hits)
        self.stats.misses += len(misses)
        return hits, misses

    def issue(self, waiting: Sequence[int]) -> None:
        """Queue the reads of the waiting experts that fit now, and lease these experts."""
        victims = self.victims(spares_pins=False)
        for index in waiting:
            if self.is_leased[index]:
                continue
            state = self.state[index]
            if state == ABSENT:
                if not self._make_room(self.sizes[index], victims, is_demand=True):
                    return
                self._reserve(index)
                self.demand.append(index)
            elif state == QUEUED:
                # Advised and not begun: now a read on demand. An abandoned stream may have put it into demand already.
                if index in self.advice:
                    self.advice.remove(index)
                    self.is_ahead[index] = False
                    self.demand.append(index)
            elif state == LOADING and self.is_ahead[index]:
                self.stats.late_hits += 1
            self.is_leased[index] = True

    def advise(self, indices: Sequence[int]) -> None:
        """Queue reads ahead, likeliest first, as far as free memory and the pin limit allow. Replaces older advice.

        Earlier predictions for other layers stay pinned as far as they are not absent. They lose their pin first.
        """
        self.drop_advice()
        layers = {self._layer_of[index] for index in indices}
        older = [i for i in self._pins if self._layer_of[i] not in layers and self.state[i] != ABSENT]
        self._pins = self._within_pin_limit([*indices, *older])
        victims = self.victims(spares_pins=True)
        for index in self._pins[: len(indices)]:
            if self.state[index] != ABSENT:
                continue
            if not self._make_room(self.sizes[index], victims, is_demand=False):
                break
            self._reserve(index)
            self.is_ahead[index] = True
            self.advice.append(index)

    def _within_pin_limit(self, indices: Sequence[int]) -> list[int]:
        """Return the first experts, up to the pin limit."""
        pinned_bytes, within = 0, list[int]()
        for index in indices:
            pinned_bytes += self.sizes[index]
            if pinned_bytes > self.pin_limit_bytes:
                break
            within.append(index)
        return within

    def drop_advice(self) -> None:
        """Forget advised reads that have not begun."""
        while self.advice:
            self.withdraw(self.advice.popleft())

    def next_read(self) -> list[int]:
        """Begin the most urgent queued read. Returns its experts, which are adjacent in the file; empty without one."""
        if not (self.demand or self.advice):
            return []
        run = self._runs.take(self.demand or self.advice)
        self.state[run] = LOADING
        return run

    def arrive(self, index: int) -> None:
        """End a read that a layer or advice requested."""
        is_ahead = bool(self.is_ahead[index])
        self.stats.add_read(self.sizes[index], bool(self.is_seen[index]), is_ahead)
        self.prefetches[0, index] += is_ahead
        self.arrive_warm(index)

    def fits_free(self, index: int) -> bool:
        """Return whether an expert is absent and fits without an eviction."""
        return bool(self.state[index] == ABSENT and self.used_bytes + self.sizes[index] <= self.capacity_bytes)

    def begin_warm(self, index: int) -> None:
        """Begin a read of the warm start."""
        self.state[index] = LOADING
        self.used_bytes += self.sizes[index]

    def arrive_warm(self, index: int) -> None:
        """End a read of the warm start."""
        self.state[index] = RESIDENT
        self.is_seen[index] = True

    def withdraw(self, index: int) -> None:
        """Forget a read that has not begun or that failed, or an expert in memory."""
        self.state[index] = ABSENT
        self.is_ahead[index] = False
        self.used_bytes -= self.sizes[index]

    def evict(self, index: int) -> None:
        """Take an expert out of memory."""
        self._evicted(index)
        self.withdraw(index)
        self.stats.evictions += 1

    def count_use_of_advice(self, index: int) -> None:
        """Count the request of an expert that was read ahead."""
        self.is_ahead[index] = False
        self.stats.prefetch_used += 1
        self.prefetches[1, index] += 1

    def victims(self, spares_pins: bool) -> Iterator[int]:
        """Yield the experts that may be evicted, first to evict first.

        The order is computed when it is first needed. It serves all reads that are started by one call.
        spares_pins: if not, pinned experts come last, least likely first.
        """
        candidates = np.flatnonzero((self.state == RESIDENT) & ~self.is_leased & self._is_stored)
        pins = dict.fromkeys(reversed(self._pins))  # least likely first
        start, count = 0, _FEW
        while start < len(candidates):
            for index in self._order(self._layer, candidates, count)[start:].tolist():
                if index not in pins and self._may_go(index):
                    yield index
            start, count = count, len(candidates)
        for index in () if spares_pins else pins:
            if self._may_go(index) and index in candidates:
                yield index

    def _may_go(self, index: int) -> bool:
        return bool(self.state[index] == RESIDENT and not self.is_leased[index])

    def _reserve(self, index: int) -> None:
        self.state[index] = QUEUED
        self.used_bytes += self.sizes[index]

    def _make_room(self, need_bytes: int, victims: Iterator[int], is_demand: bool) -> bool:
        """Evict until need_bytes are free. Returns False if leases or reads have to end first.

        is_demand: withdraw queued advice before any eviction, least likely first.
        """
        missing = self.used_bytes + need_bytes - self.capacity_bytes
        while is_demand and self.advice and missing > 0:
            index = self.advice.pop()
            self.withdraw(index)
            missing -= self.sizes[index]
        taken: list[int] = []
        while missing > 0:
            victim = next(victims, None)
            if victim is None:
                return False
            taken.append(victim)
            missing -= self.sizes[victim]
        for victim in taken:
            self.evict(victim)
        return True
