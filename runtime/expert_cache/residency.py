"""Residency: the state of each of N experts (absent, queued, loading, resident), and the queues of reads.

This is the specification of `native/experts/residency.cpp`, which decides by default. PythonCache and SimulatedCache
decide by it. It has no storage, threads or time. The owner begins reads, reports their end, and holds a lock if
several threads call. Eviction is in `eviction.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..options.readers import Takes
from ..storage.read_runs import NONE, ReadRuns
from .cache_spec import ABSENT, LOADING, QUEUED, RESIDENT, CacheSpec
from .eviction import EvictingLedger, Order


class Residency(EvictingLedger):
    """A ledger. Invariant: bytes of queued, loading and resident experts never exceed the capacity.

    Parameters and arrays that are not listed here are those of EvictingLedger.
    spec: each use is added to its records.
    runs: experts that are read together; None: one by one.
    most_queued: reads ahead that are queued at once; 0: all. Each evicts when it is queued.

    is_seen: has been in memory, bool [N].
    demand: queued reads of requested experts, first requested first. They come before advice.
    prefetches: reads ahead of each expert, and those requested in time, int64 [2, N].

    A predicted expert is pinned until its layer requests experts. Then it is leased, or the prediction was wrong.

    A queued read takes memory. If the experts of a pass do not fit in the cache (`ExpertRecords.fits_pass`), only so
    many reads are queued as keep the readers busy. Otherwise the reads of one layer would evict what the others need.
    """

    def __init__(
        self,
        spec: CacheSpec,
        order: Order,
        evicted: Callable[[int], None] = lambda index: None,
        runs: ReadRuns | None = None,
        most_queued: int = 0,
    ) -> None:
        super().__init__(spec, order, evicted)
        count = len(spec.sizes)
        self.pin_limit_bytes, self._records = spec.pin_limit_bytes, spec.records
        self.is_seen = np.zeros(count, bool)
        self.prefetches = np.zeros((2, count), np.int64)
        self.demand = deque[int]()
        self._runs = ReadRuns(self.sizes, [NONE] * count) if runs is None else runs
        self._layer_of: list[int] = spec.records.layer.tolist()
        self._clock, self._most_queued = 0, most_queued
        self._has_unqueued = False  # whether the running layer waits for experts whose reads are not queued yet
        self._backlog = deque[int]()  # advised experts that are not queued yet, most urgent first

    def request(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Request experts for one layer of one pass. Returns hits, which are leased now, and misses."""
        hits: list[int] = []
        misses: list[int] = []
        self._layer = layer
        self._pins = [index for index in self._pins if self._layer_of[index] != layer]
        for index in [i for i in self.advice if self._layer_of[i] == layer and i not in experts]:  # wrong prediction
            self.advice.remove(index)
            self._make_absent(index)
        self._backlog = deque(index for index in self._backlog if self._layer_of[index] != layer)
        self._clock += 1
        self._records.use(experts, self._clock)
        self._records.fits_pass, self._has_unqueued = self._fits_pass(experts), False
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

    def _fits_pass(self, experts: Sequence[int]) -> bool:
        """Return whether the cache holds a pass whose layers all need as much. With an encoder it counts as true."""
        needed_bytes = sum(self.sizes[index] for index in experts) * self._records.num_layers
        return self._records.encoder_layers > 0 or needed_bytes <= self.capacity_bytes

    def queue_and_lease(self, waiting: Sequence[int]) -> None:
        """Queue the reads of the waiting experts that fit now, and lease these experts.

        If a pass does not fit, advice is queued after the last of them.
        """
        self._has_unqueued = not self._queue_demand(waiting)
        if not (self._records.fits_pass or self._has_unqueued):
            self._queue_advice()

    def _queue_demand(self, waiting: Sequence[int]) -> bool:
        """Queue reads of the waiting experts. Returns False if some are left."""
        victims, has_all = self.victims(spares_pins=False), True
        on_the_way = [index for index in waiting if self.is_leased[index] and self.state[index] in (QUEUED, LOADING)]
        for index in waiting:
            if self.is_leased[index]:
                continue
            state = self.state[index]
            if state == ABSENT:
                if not self._records.fits_pass and self._runs.keep_busy(on_the_way):
                    has_all = False
                    continue
                if not self._make_room(self.sizes[index], victims, is_demand=True):
                    return False
                self._reserve(index)
                self.demand.append(index)
                on_the_way.append(index)
            elif state == QUEUED:
                # Advised and not begun: now a read on demand. An abandoned stream may have put it into demand already.
                if index in self.advice:
                    self.advice.remove(index)
                    self.is_ahead[index] = False
                    self.demand.append(index)
            elif state == LOADING and self.is_ahead[index]:
                self.stats.late_hits += 1
            self.is_leased[index] = True
        return has_all

    def advise(self, indices: Sequence[int]) -> None:
        """Queue reads ahead, likeliest first, as far as free memory and the pin limit allow. Replaces older advice.

        Earlier predictions for other layers stay pinned as far as they are not absent. They lose their pin first.
        """
        self.drop_advice()
        layers = {self._layer_of[index] for index in indices}
        older = [i for i in self._pins if self._layer_of[i] not in layers and self.state[i] != ABSENT]
        self._pins = self._within_pin_limit([*indices, *older])
        self._backlog = deque(self._pins[: len(indices)])
        self._queue_advice()

    def _queue_advice(self) -> None:
        """Queue experts of the backlog, as many as may be queued at once."""
        victims = self.victims(spares_pins=True)
        while self._backlog and not 0 < self._most_queued <= len(self.advice) and not self._waits_for_demand():
            if not self._records.fits_pass and self._runs.keep_busy(self.advice):
                self._backlog.clear()  # more would evict what this pass needs
                return
            index = self._backlog.popleft()
            if self.state[index] != ABSENT:
                continue
            if not self._make_room(self.sizes[index], victims, is_demand=False):
                self._backlog.clear()
                return
            self._reserve(index)
            self.is_ahead[index] = True
            self.advice.append(index)

    def _waits_for_demand(self) -> bool:
        """Return whether advice is queued later, because a pass does not fit and demand is not queued yet."""
        is_in_layer = self._has_unqueued and bool(self.is_leased.any())  # a layer that gave up holds no lease
        return is_in_layer and not self._records.fits_pass

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
        self._backlog.clear()
        while self.advice:
            self._make_absent(self.advice.popleft())

    def next_read(self, takes: Takes = "any") -> list[int]:
        """Begin the most urgent queued read. Returns its experts, which are adjacent in the file; empty without one.

        takes: the queues that count.
        """
        queue = {"any": self.demand or self.advice, "demand": self.demand, "advice": self.advice}[takes]
        if not queue:
            return []
        run = self._runs.take(queue)
        self.state[run] = LOADING
        if queue is self.advice:
            self._queue_advice()
        return run

    def arrive(self, index: int) -> None:
        """End a read that a layer or advice requested."""
        is_ahead = bool(self.is_ahead[index])
        self.stats.add_read(self.sizes[index], bool(self.is_seen[index]), is_ahead)
        self.prefetches[0, index] += is_ahead
        self._become_resident(index)

    def fits_free(self, index: int) -> bool:
        """Return whether an expert is absent and fits without an eviction."""
        return bool(self.state[index] == ABSENT and self.used_bytes + self.sizes[index] <= self.capacity_bytes)

    def begin_warm(self, index: int) -> None:
        """Begin a read of the warm start."""
        self.state[index] = LOADING
        self.used_bytes += self.sizes[index]

    def arrive_warm(self, index: int) -> None:
        """End a read of the warm start."""
        self._become_resident(index)

    def fail_read(self, index: int) -> None:
        """End a read that failed. The expert is absent again, and a lease on it stays."""
        self._make_absent(index)

    def _become_resident(self, index: int) -> None:
        self.state[index] = RESIDENT
        self.is_seen[index] = True

    def count_use_of_advice(self, index: int) -> None:
        """Count the request of an expert that was read ahead."""
        self.is_ahead[index] = False
        self.stats.prefetch_used += 1
        self.prefetches[1, index] += 1

    def _reserve(self, index: int) -> None:
        self.state[index] = QUEUED
        self.used_bytes += self.sizes[index]
