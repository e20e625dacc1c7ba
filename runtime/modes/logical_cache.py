"""LogicalCache: the experts that would be in memory if every read took no time.

Lossy decisions use this cache, not the real one, whose state depends on the timing of reads.
Equal requests in equal order therefore give equal decisions on every machine.
A run with the native expert cache has its form in `native/experts/logical_cache.cpp`, for which this is the
specification. Replays of traces, and runs with an accelerator, use it as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.instant_cache import InstantCache
from ..expert_cache.policies import PolicyScore
from ..expert_cache.serve_layer import too_large_error
from ..storage.read_runs import MAX_RUN_BYTES


class DecidingCache(Protocol):
    """The cache by which lossy modes decide."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, without the warm start."""
        ...

    def is_resident(self, index: int) -> bool:
        """Return whether an expert is resident."""
        ...

    def request(self, layer: int, experts: Sequence[int], advice: Sequence[int] = ()) -> None:
        """Request experts for one layer of one pass, then advice for experts that may be needed next.

        Raises MemoryBudgetExceeded if an expert does not fit.
        """
        ...

    def advise(self, advice: Sequence[int]) -> None:
        """Read experts ahead, likeliest first."""
        ...

    def begin_sequence(self) -> None:
        """Restart the per-sequence counts of the policy."""
        ...


class LogicalCache(DecidingCache):
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
        return self._cache.stats.bytes_read

    def is_resident(self, index: int) -> bool:
        return index in self._on_device or self._cache.is_resident(index)

    def request(self, layer: int, experts: Sequence[int], advice: Sequence[int] = ()) -> None:
        self._cache.serve(layer, self._absent(experts), self._absent(advice))

    def advise(self, advice: Sequence[int]) -> None:
        if absent := self._absent(advice):
            self._cache.prefetch(absent)

    def begin_sequence(self) -> None:
        self._cache.begin_sequence()

    def _absent(self, experts: Sequence[int]) -> list[int]:
        return [index for index in experts if index not in self._on_device]


class NativeLogicalCache(DecidingCache):
    """A LogicalCache of the extension, without an accelerator.

    spec, warm: as in LogicalCache.
    extension: the module of the native kernels.
    eviction: its Eviction, what the policy goes by.

    native: its LogicalCache.
    """

    def __init__(self, extension: Any, spec: CacheSpec, eviction: Any, warm: Sequence[int]) -> None:
        self._sizes, self._capacity_bytes = spec.sizes, spec.capacity_bytes
        records = spec.records.unused()
        limits = (spec.capacity_bytes, spec.pin_limit_bytes, MAX_RUN_BYTES)
        facts = (spec.sizes.tolist(), records.layer.tolist(), records.heat.tolist(), records.half_life, eviction)
        self.native = extension.LogicalCache(*facts, *limits)
        self.native.fill(warm)

    @property
    def bytes_read(self) -> int:
        return int(self.native.bytes_read)

    def is_resident(self, index: int) -> bool:
        return bool(self.native.is_resident(index))

    def request(self, layer: int, experts: Sequence[int], advice: Sequence[int] = ()) -> None:
        too_large = self.native.serve(layer, experts, advice)
        if too_large >= 0:
            raise too_large_error(int(self._sizes[too_large]), self._capacity_bytes)

    def advise(self, advice: Sequence[int]) -> None:
        self.native.read_ahead(advice)

    def begin_sequence(self) -> None:
        self.native.begin_sequence()
