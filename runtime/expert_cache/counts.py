"""What an expert cache counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Counts since the last reset. A lookup is one expert asked for by one layer of one pass.

    late_hits: misses whose read a prefetch had already begun (they count as misses). rereads: reads of an expert that
    had been in memory before. prefetch_used: prefetched experts that a layer asked for before they were evicted.
    busy_ns: time in which at least one read was under way. Reads of the warm start count there and in warm_reads.
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
        """Count one read that a layer or a prediction asked for."""
        self.reads += 1
        self.bytes_read += size_bytes
        self.rereads += is_reread
        self.prefetch_reads += is_ahead

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 1 where nothing was looked up."""
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def prefetch_precision(self) -> float | None:
        """Share of prefetched experts that were used; None without prefetches."""
        return self.prefetch_used / self.prefetch_reads if self.prefetch_reads else None

    def counts(self) -> dict[str, int]:
        """What the cache did, without times and the warm start: all that a replay can tell. For `--json`."""
        names = ("lookups", "hits", "misses", "late_hits", "rereads", "evictions", "bytes_read")
        return {name: getattr(self, name) for name in (*names, "prefetch_reads", "prefetch_used")}

    def copy(self) -> CacheStats:
        """A snapshot."""
        return CacheStats(*(getattr(self, field.name) for field in fields(self)))

    def since(self, earlier: CacheStats) -> CacheStats:
        """Difference of two snapshots."""
        return CacheStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def plus(self, other: CacheStats) -> CacheStats:
        """Sum of two counts."""
        return CacheStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
