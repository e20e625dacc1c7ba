"""Ranges of bytes that are finished, merged where they touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Intervals:
    """A set of bytes as half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the bytes from `start` to before `end`."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def clear(self) -> None:
        """Remove everything."""
        self._starts.clear()
        self._ends.clear()

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return sum(self._ends) - sum(self._starts)

    def has(self, start: int, end: int) -> bool:
        """Return whether all bytes of a range are there."""
        return start >= end or self.end_from(start) >= end

    def end_from(self, start: int) -> int:
        """Return the first byte from `start` on that is not there."""
        at = bisect_right(self._starts, start) - 1
        return max(start, self._ends[at]) if at >= 0 else start

    def overlap_bytes(self, start: int, end: int) -> int:
        """Return how many bytes of a range are there."""
        return (end - start) - sum(max(0, min(end, gap_end) - max(start, gap)) for gap, gap_end in self.missing(end))

    def missing(self, size_bytes: int) -> list[tuple[int, int]]:
        """Return the ranges below `size_bytes` that are not there, in order."""
        starts, ends = [0, *self._ends], [*self._starts, size_bytes]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
