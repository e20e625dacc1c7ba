"""LogicalCache: the experts that would be in memory if every read took no time.

Lossy decisions use this cache, not the real one, whose state depends on the timing of reads.
Equal requests in equal order therefore give equal decisions on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.instant_cache import InstantCache
from ..expert_cache.policies import PolicyScore


class LogicalCache:
    """Residency of N experts, with all their versions, as demand and advice determine it.

    spec: sizes, records and limits. The capacity is that of a full context: memory that a short sequence leaves free
        does not count. The uses in the records are not shared with the real cache.
    policy: score by which experts are kept.

    warm: experts in the cache at the start, in order, as far as they fit.
    on_device: experts that stay on an accelerator. They are resident and use no capacity.
    """

    def __init__(
        self,
        spec: CacheSpec,
        policy: PolicyScore,
        warm: Sequence[int],
        on_device: Collection[int] = (),
    ) -> None:
        self._on_device = frozenset(on_device)
        self._cache = InstantCache(spec, policy)
        self._cache.fill([index for index in warm if index not in self._on_device])

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, without the warm start."""
        return self._cache.stats.bytes_read

    def is_resident(self, index: int) -> bool:
        """Return whether an expert is resident."""
        return index in self._on_device or self._cache.is_resident(index)

    def request(self, layer: int, experts: Sequence[int], advice: Sequence[int] = ()) -> None:
        """Request experts for one layer of one pass, then advice for experts that may be needed next.

        Raises MemoryBudgetExceeded if an expert does not fit.
        """
        self._cache.serve(layer, self._absent(experts), self._absent(advice))

    def advise(self, advice: Sequence[int]) -> None:
        """Read experts ahead, likeliest first."""
        if absent := self._absent(advice):
            self._cache.prefetch(absent)

    def begin_sequence(self) -> None:
        """Restart the per-sequence counts of the policy."""
        self._cache.begin_sequence()

    def _absent(self, experts: Sequence[int]) -> list[int]:
        return [index for index in experts if index not in self._on_device]
