"""Eviction: which experts leave memory, in which order, until the bytes of a read fit.

This is the specification of `native/experts/eviction.cpp`, which evicts by default. The scores of the policies are in
`policies.py`. What happens to experts before and after is in `residency.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from .cache_spec import ABSENT, RESIDENT, CacheSpec
from .cache_stats import CacheStats
from .policies import PolicyScore
from .records import ExpertRecords

_FEW = 8
"""Experts that are ordered first for eviction. One request rarely evicts more."""
Order = Callable[[int, np.ndarray, int], np.ndarray]
"""Maps the running layer, candidates, int [C], and a count to this many candidates, first to evict first."""


class EvictingLedger:
    """States of N experts, the bytes that they take, and their eviction.

    spec: an expert of 0 bytes is always resident.
    order: chooses the experts to evict.
    evicted: called with every evicted expert.

    state: int8 [N].
    is_leased: held or awaited by a layer, bool [N]. A leased expert is never evicted.
    is_ahead: read ahead and not requested since, bool [N].
    advice: queued reads ahead, most urgent first.
    """

    def __init__(self, spec: CacheSpec, order: Order, evicted: Callable[[int], None]) -> None:
        count = len(spec.sizes)
        self.sizes: list[int] = spec.sizes.tolist()
        self.capacity_bytes, self.used_bytes = spec.capacity_bytes, 0
        self._order, self._evicted = order, evicted
        self._is_stored = spec.sizes > 0
        self.state = np.where(self._is_stored, ABSENT, RESIDENT).astype(np.int8)
        self.is_leased = np.zeros(count, bool)
        self.is_ahead = np.zeros(count, bool)
        self.advice = deque[int]()
        self.stats = CacheStats()
        self._pins: list[int] = []  # predicted experts, likeliest first
        self._layer = 0  # that requested experts last

    def victims(self, spares_pins: bool) -> Iterator[int]:
        """Yield the experts that may be evicted, first to evict first.

        The order is computed when it is first needed. It serves all reads that are started by one call.
        spares_pins: if not, pinned experts come last, least likely first.
        """
        candidates = np.flatnonzero((self.state == RESIDENT) & ~self.is_leased & self._is_stored)
        pins = dict.fromkeys(reversed(self._pins))  # least likely first
        for index in self._in_order(candidates):
            if index not in pins and self._is_evictable(index):
                yield index
        if spares_pins:
            return
        for index in pins:
            if self._is_evictable(index) and index in candidates:
                yield index

    def _in_order(self, candidates: np.ndarray) -> Iterator[int]:
        """Yield candidates, first to evict first. A few are ordered first, the rest only if they are needed."""
        start, count = 0, _FEW
        while start < len(candidates):
            yield from self._order(self._layer, candidates, count)[start:].tolist()
            start, count = count, len(candidates)

    def _is_evictable(self, index: int) -> bool:
        return bool(self.state[index] == RESIDENT and not self.is_leased[index])

    def evict(self, index: int) -> None:
        """Take an expert out of memory."""
        self._evicted(index)
        self._make_absent(index)
        self.stats.evictions += 1

    def _make_absent(self, index: int) -> None:
        """Set the state of an expert to ABSENT and stop counting its bytes."""
        self.state[index] = ABSENT
        self.is_ahead[index] = False
        self.used_bytes -= self.sizes[index]

    def _make_room(self, need_bytes: int, victims: Iterator[int], is_demand: bool) -> bool:
        """Evict until need_bytes are free. Returns False if leases or reads have to end first.

        is_demand: withdraw queued advice before any eviction, least likely first.
        """
        missing = self.used_bytes + need_bytes - self.capacity_bytes
        while is_demand and self.advice and missing > 0:
            index = self.advice.pop()
            self._make_absent(index)
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


def eviction_order(
    records: ExpertRecords, score: PolicyScore, running_layer: int, candidates: np.ndarray, count: int | None = None
) -> np.ndarray:
    """Return candidates in the order of eviction. Ties are broken by least recent use, then by index.

    Groups of ExpertRecords.eviction_group come before every score.
    candidates: int [C].
    count: number of candidates to return; None: all.
    """
    scores = score(records, running_layer)[candidates]
    if count is not None and count < len(candidates) and not records.encoder_layers:
        # A read evicts one or two of some hundred candidates, so only these few are sorted.
        is_low = scores <= np.partition(scores, count)[count]
        candidates, scores = candidates[is_low], scores[is_low]
    keys = [candidates, records.last_used[candidates], scores]
    if records.encoder_layers:
        keys.append(records.eviction_group(running_layer)[candidates])
    return candidates[np.lexsort(keys)][:count]
