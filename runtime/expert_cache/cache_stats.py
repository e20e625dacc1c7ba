"""Counts of an expert cache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter, sub


@dataclass(slots=True)
class CacheStats:
    """Counts since the cache was opened. A lookup is one expert requested by one layer of one pass.

    The order of the fields is that of CacheCounts in `native/experts/residency.h`: both share one array.

    hits: lookups of experts that were in memory.
    misses: the other lookups.
    late_hits: misses whose read a prefetch had already begun.

    evictions: experts taken out of memory.
    reads, bytes_read: reads that a layer or a prefetch requested, and their bytes.
    rereads: those of experts that had been in memory before.

    prefetch_reads: experts read ahead.
    prefetch_used: those that a layer requested before they were evicted.
    prefetch_hits: those that were in memory by then.

    stall_ns: time in which a layer waited for reads.
    busy_ns: time in which a read was under way, the warm start included.
    warm_reads: reads of the warm start.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    late_hits: int = 0
    evictions: int = 0
    reads: int = 0
    rereads: int = 0
    bytes_read: int = 0
    stall_ns: int = 0
    prefetch_reads: int = 0
    prefetch_used: int = 0
    prefetch_hits: int = 0
    warm_reads: int = 0
    busy_ns: int = 0

    def add_read(self, size_bytes: int, is_reread: bool, is_ahead: bool) -> None:
        """Count one read that a layer or a prefetch requested."""
        self.reads += 1
        self.bytes_read += size_bytes
        self.rereads += is_reread
        self.prefetch_reads += is_ahead

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def prefetch_precision(self) -> float | None:
        """Share of prefetched experts that were used; None without prefetches."""
        return self.prefetch_used / self.prefetch_reads if self.prefetch_reads else None

    def replayable_counts(self) -> dict[str, int]:
        """Return the counts that a replay can give, for `--json`: all but times and the warm start."""
        names = ("lookups", "hits", "misses", "late_hits", "rereads", "evictions", "bytes_read")
        return {name: getattr(self, name) for name in (*names, "prefetch_reads", "prefetch_used")}

    def copy(self) -> CacheStats:
        """Return a snapshot."""
        return CacheStats(*_VALUES(self))

    def since(self, earlier: CacheStats) -> CacheStats:
        """Return the difference of two snapshots."""
        return CacheStats(*map(sub, _VALUES(self), _VALUES(earlier)))

    def plus(self, other: CacheStats) -> CacheStats:
        """Return the sum of two counts."""
        return CacheStats(*map(add, _VALUES(self), _VALUES(other)))


_VALUES = attrgetter(*(field.name for field in fields(CacheStats)))
"""Returns all values at once. A server adds counts for every answer of every pass."""
