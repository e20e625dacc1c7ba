"""Statistics of one run: times per token, cache counts, bytes read, peak memory. Collecting them is cheap."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..expert_cache.cache_stats import CacheStats


def peak_memory_bytes() -> int:
    """Return the largest resident set of this process so far, bytes, including file mappings.

    It is VmHWM if the kernel reports it. The peak of `getrusage` may be inherited from the parent process.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory() -> bool:
    """Restart the count of `peak_memory_bytes`. Returns False if the system does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def quantile(values: Sequence[int], share: float) -> int | None:
    """Return the smallest value that `share` of the values do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


@dataclass(slots=True)
class PhaseTimes:
    """Time inside kernels in ns, including the Python code around them.

    dense_ns: attention, norms, routers, shared experts and head.
    experts_ns: routed experts.
    shared_ns: the part of dense_ns for shared experts.
    """

    dense_ns: int = 0
    experts_ns: int = 0
    shared_ns: int = 0

    def copy(self) -> PhaseTimes:
        """Return a copy."""
        return PhaseTimes(self.dense_ns, self.experts_ns, self.shared_ns)

    def since(self, before: PhaseTimes) -> PhaseTimes:
        """Return the difference to earlier times."""
        return PhaseTimes(
            self.dense_ns - before.dense_ns, self.experts_ns - before.experts_ns, self.shared_ns - before.shared_ns
        )


@dataclass(frozen=True, slots=True)
class DecodeShares:
    """Shares of the time of the tokens after the first one. The first four sum to 1.

    stall: waiting for reads.
    experts: routed experts.
    dense: dense weights, shared experts included.
    other: routing, the cache and advice.

    storage_busy: share of the time in which a read was in progress, in addition to other work.
    """

    stall: float
    experts: float
    dense: float
    other: float
    storage_busy: float


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Statistics of one generation. Times are in nanoseconds; None means that there is no value.

    TPOT values and tokens_per_s cover the tokens after the first one.
    bytes_read_per_token: padded expert bytes read per emitted token. All passes and prefetches count.

    decode_bytes_read_per_token: padded expert bytes read per token after the first one.
    """

    prompt_tokens: int
    tokens: int
    ttft_ns: int | None
    tpot_p50_ns: int | None
    tpot_p95_ns: int | None
    tokens_per_s: float | None
    lookups: int
    hit_rate: float
    misses: int
    late_hits: int
    evictions: int
    rereads: int
    bytes_read: int
    bytes_read_per_token: float
    stall_ns: int
    prefetch_reads: int
    prefetch_hits: int
    prefetch_precision: float | None
    prefetch_recall: float | None
    peak_memory_bytes: int
    decode_shares: DecodeShares | None = None
    decode_bytes_read_per_token: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class RunRecorder:
    """Collects time and cache counts of each emitted token, and phase times if they are given."""

    prompt_tokens: int
    elapsed_ns: list[int] = field(default_factory=list)
    cache: CacheStats = field(default_factory=CacheStats)
    _stall_ns: int = 0
    _busy_ns: int = 0
    _decode_bytes: int = 0
    _phases: PhaseTimes | None = None

    def add(self, elapsed_ns: int, cache: CacheStats, phases: PhaseTimes | None = None) -> None:
        """Add one emitted token.

        elapsed_ns: time since the previous token.
        cache, phases: what the cache and the phases counted during that time.
        """
        if self.elapsed_ns:
            self._decode_bytes += cache.bytes_read
        if self.elapsed_ns and phases is not None:
            so_far = self._phases or PhaseTimes()
            self._phases = PhaseTimes(so_far.dense_ns + phases.dense_ns, so_far.experts_ns + phases.experts_ns)
            self._stall_ns += cache.stall_ns
            self._busy_ns += cache.busy_ns
        self.elapsed_ns.append(elapsed_ns)
        self.cache = self.cache.plus(cache)

    def _shares(self) -> DecodeShares | None:
        total = sum(self.elapsed_ns[1:])
        if self._phases is None or not total:
            return None
        stall, experts, dense = (t / total for t in (self._stall_ns, self._phases.experts_ns, self._phases.dense_ns))
        return DecodeShares(stall, experts, dense, 1 - stall - experts - dense, self._busy_ns / total)

    def finish(self, prefetch_recall: float | None = None) -> RunStatistics:
        """Sum up. The peak memory is that of the time of this call."""
        later, cache, tokens = self.elapsed_ns[1:], self.cache, len(self.elapsed_ns)
        return RunStatistics(
            prompt_tokens=self.prompt_tokens,
            tokens=tokens,
            ttft_ns=self.elapsed_ns[0] if self.elapsed_ns else None,
            tpot_p50_ns=quantile(later, 0.5),
            tpot_p95_ns=quantile(later, 0.95),
            tokens_per_s=len(later) / (sum(later) / 1e9) if sum(later) else None,
            lookups=cache.lookups,
            hit_rate=cache.hit_rate,
            misses=cache.misses,
            late_hits=cache.late_hits,
            evictions=cache.evictions,
            rereads=cache.rereads,
            bytes_read=cache.bytes_read,
            bytes_read_per_token=cache.bytes_read / max(tokens, 1),
            stall_ns=cache.stall_ns,
            prefetch_reads=cache.prefetch_reads,
            prefetch_hits=cache.prefetch_hits,
            prefetch_precision=cache.prefetch_precision,
            prefetch_recall=prefetch_recall,
            peak_memory_bytes=peak_memory_bytes(),
            decode_shares=self._shares(),
            decode_bytes_read_per_token=self._decode_bytes / max(tokens - 1, 1),
        )
