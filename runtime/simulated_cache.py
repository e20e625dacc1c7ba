"""SimulatedCache: the decisions of ExpertCache, without bytes, threads and time.

Who drives it says when a read begins and when it ends: `simulate.py` at once, `timeline.py` when a device would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from .eviction import ExpertRecords, PolicyScore, eviction_order
from .expert_cache import ABSENT, LOADING, QUEUED, RESIDENT


class SimulatedCache:
    """Residency of N experts. chosen None: what is needed again last is evicted first, whatever was advised.

    sizes: bytes per expert, int64 [N]. records: layers and calibration frequencies; its counts are not touched.
    first_use: int64 [N], position of each expert's first access; only read where chosen is None.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        capacity_bytes: int,
        records: ExpertRecords,
        chosen: PolicyScore | None,
        first_use: np.ndarray,
        pin_limit_bytes: int = 0,
    ) -> None:
        self.sizes, self.capacity_bytes = sizes.tolist(), capacity_bytes
        self._chosen, self._records, self._next_use = chosen, records.unused(), first_use.copy()
        self._pin_limit_bytes, self._pins = pin_limit_bytes, list[int]()
        self._state = np.zeros(len(sizes), np.int8)
        self._is_leased = np.zeros(len(sizes), bool)
        self._is_seen = np.zeros(len(sizes), bool)
        self._is_ahead = np.zeros(len(sizes), bool)
        self._demand, self._advice = deque[int](), deque[int]()
        self._used_bytes = self._clock = self._layer = 0
        self.lookups = self.misses = self.rereads = self.evictions = self.bytes_read = 0
        self.late_hits = self.prefetch_reads = self.prefetch_used = 0

    def fill(self, indices: Sequence[int]) -> None:
        """The warm start: what fits, in order; evicts nothing and counts as seen."""
        for index in indices:
            if self._state[index] == ABSENT and self._used_bytes + self.sizes[index] <= self.capacity_bytes:
                self._state[index] = RESIDENT
                self._is_seen[index] = True
                self._used_bytes += self.sizes[index]

    def holds(self, index: int) -> bool:
        """Whether an expert is resident."""
        return bool(self._state[index] == RESIDENT)

    def begin_sequence(self) -> None:
        """What the policy counts within a sequence counts from here."""
        self._records.begin_sequence()

    def ask(
        self, layer: int, experts: Sequence[int], next_use: np.ndarray | None = None
    ) -> tuple[list[int], list[int]]:
        """One layer of one pass asks for experts: those that are there, now leased, and those that are not.

        next_use: positions of the accesses after this one, int64, one per expert.
        """
        self._clock += 1
        self._layer = layer
        self._records.use(experts, self._clock)
        if next_use is not None:
            self._next_use[list(experts)] = next_use
        is_hit = {index: self._state[index] == RESIDENT for index in experts}
        hits = [index for index in experts if is_hit[index]]
        misses = [index for index in experts if not is_hit[index]]
        for index in hits:
            self._count_use_of_advice(index)
        self._is_leased[hits] = True
        self.lookups += len(experts)
        self.misses += len(misses)
        return hits, misses

    def issue(self, waiting: Sequence[int]) -> None:
        """Queue the reads of as many waiting experts as fit now, and lease them."""
        victims = self._victims(spares_pins=False)
        for index in waiting:
            if self._is_leased[index]:
                continue
            state = self._state[index]
            if state == ABSENT:
                if not self._make_room(self.sizes[index], victims, is_demand=True):
                    return
                self._reserve(index)
                self._demand.append(index)
            elif state == QUEUED:
                self._advice.remove(index)
                self._is_ahead[index] = False
                self._demand.append(index)
            elif state == LOADING:
                self.late_hits += 1
            self._is_leased[index] = True

    def advise(self, indices: Sequence[int]) -> None:
        """Queue reads ahead, likeliest first, as far as room and the pin limit go. Replaces older advice."""
        while self._advice:
            self._withdraw(self._advice.popleft())
        self._pins, pinned = [], 0
        for index in indices:
            pinned += self.sizes[index]
            if pinned > self._pin_limit_bytes:
                break
            self._pins.append(index)
        victims = self._victims(spares_pins=True)
        for index in self._pins:
            if self._state[index] != ABSENT:
                continue
            if not self._make_room(self.sizes[index], victims, is_demand=False):
                break
            self._reserve(index)
            self._is_ahead[index] = True
            self._advice.append(index)

    def next_read(self) -> int | None:
        """The most urgent read, which has now begun; None if there is nothing to read."""
        if not (self._demand or self._advice):
            return None
        index = self._demand.popleft() if self._demand else self._advice.popleft()
        self._state[index] = LOADING
        return index

    def arrive(self, index: int) -> None:
        """A read that had begun is complete."""
        self._state[index] = RESIDENT
        self.bytes_read += self.sizes[index]
        self.rereads += int(self._is_seen[index])
        self.prefetch_reads += int(self._is_ahead[index])
        self._is_seen[index] = True

    def ready(self, waiting: Sequence[int]) -> list[int]:
        """Those of the waiting experts that can be computed, in their order."""
        return [index for index in waiting if self._is_leased[index] and self._state[index] == RESIDENT]

    def unlease(self, indices: Sequence[int]) -> None:
        """These have been computed and may be evicted."""
        for index in indices:
            self._count_use_of_advice(index)
        self._is_leased[list(indices)] = False

    def _count_use_of_advice(self, index: int) -> None:
        self.prefetch_used += int(self._is_ahead[index])
        self._is_ahead[index] = False

    def _reserve(self, index: int) -> None:
        self._state[index] = QUEUED
        self._used_bytes += self.sizes[index]

    def _withdraw(self, index: int) -> None:
        self._state[index] = ABSENT
        self._is_ahead[index] = False
        self._used_bytes -= self.sizes[index]

    def _victims(self, spares_pins: bool) -> Iterator[int]:
        """What may be evicted, first to go first; the order is made when it is first needed."""
        order = self._order(np.flatnonzero((self._state == RESIDENT) & ~self._is_leased)).tolist()
        rank = {index: position for position, index in enumerate(self._pins)}
        pinned = [] if spares_pins else sorted((i for i in order if i in rank), key=lambda i: -rank[i])
        for index in (*(i for i in order if i not in rank), *pinned):
            if self._state[index] == RESIDENT and not self._is_leased[index]:
                yield index

    def _order(self, candidates: np.ndarray) -> np.ndarray:
        if self._chosen is None:
            return candidates[np.lexsort((candidates, -self._next_use[candidates]))]
        return eviction_order(self._records, self._chosen, self._layer, candidates)

    def _make_room(self, need_bytes: int, victims: Iterator[int], is_demand: bool) -> bool:
        missing = self._used_bytes + need_bytes - self.capacity_bytes
        while is_demand and self._advice and missing > 0:
            index = self._advice.pop()
            self._withdraw(index)
            missing -= self.sizes[index]
        taken: list[int] = []
        while missing > 0:
            victim = next(victims, None)
            if victim is None:
                return False
            taken.append(victim)
            missing -= self.sizes[victim]
        for victim in taken:
            self._withdraw(victim)
            self.evictions += 1
        return True
