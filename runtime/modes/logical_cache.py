"""LogicalCache: what would be in memory if every read took no time.

Lossy decisions read this and never the cache itself, where arrival is a matter of luck: the same requests in the same
order give the same decisions on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..expert_cache.eviction import ExpertRecords, PolicyScore
from ..expert_cache.instant_cache import InstantCache


class LogicalCache:
    """Residency of N experts, all their versions counted, as demand and advice would have it.

    sizes: bytes, int64 [N]. records: layers and calibration frequencies; counts of its own. warm: what it starts with,
    as far as that fits, first index first. The capacity is that of a full context: what a short sequence leaves free
    is not counted. on_device: experts that stay on an accelerator, which are there and take nothing of the capacity.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        capacity_bytes: int,
        records: ExpertRecords,
        policy: PolicyScore,
        pin_limit_bytes: int,
        warm: Sequence[int],
        on_device: Collection[int] = (),
    ) -> None:
        self._on_device = frozenset(on_device)
        self._cache = InstantCache(sizes, capacity_bytes, records, policy, np.empty(0, np.int64), pin_limit_bytes)
        self._cache.fill([index for index in warm if index not in self._on_device])

    @property
    def bytes_read(self) -> int:
        """So far, the warm start left out."""
        return self._cache.stats.bytes_read

    def holds(self, index: int) -> bool:
        """Whether an expert is there."""
        return index in self._on_device or self._cache.holds(index)

    def request(self, layer: int, experts: Sequence[int], advice: Sequence[int] = ()) -> None:
        """One layer of one pass asks for experts, and behind them for others that may be needed next.

        Raises MemoryBudgetExceeded if one does not fit.
        """
        self._cache.request(layer, self._absent(experts), self._absent(advice))

    def advise(self, advice: Sequence[int]) -> None:
        """Experts that are read ahead, likeliest first."""
        if absent := self._absent(advice):
            self._cache.prefetch(absent)

    def begin_sequence(self) -> None:
        """What the policy counts within a sequence counts from here."""
        self._cache.begin_sequence()

    def _absent(self, experts: Sequence[int]) -> list[int]:
        return [index for index in experts if index not in self._on_device]
