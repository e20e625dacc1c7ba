"""Sets of ranges of whole numbers. Adjacent ranges are joined."""

from __future__ import annotations

from collections.abc import Iterator


class Ranges:
    """Ranges with a start and an exclusive end. Invariant: no two overlap or touch."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # end by start
        self._starts: dict[int, int] = {}  # start by end
        self.total = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each range, in order."""
        return iter(sorted(self._ends.items()))

    def add(self, start: int, end: int) -> None:
        """Add a range that overlaps none."""
        if start >= end:
            return
        self.total += end - start
        start = self._starts.pop(start, start)
        end = self._ends.pop(end, end)
        self._ends[start], self._starts[end] = end, start

    def cut(self, start: int, end: int) -> None:
        """Remove a part of one range."""
        outer = max(first for first in self._ends if first <= start)
        outer_end = self._ends.pop(outer)
        del self._starts[outer_end]
        self.total -= outer_end - outer
        self.add(outer, start)
        self.add(end, outer_end)

    def narrowest(self, size: int) -> int | None:
        """Return the start of the narrowest range of at least `size`, the first of equals; None without one."""
        candidates = [(end - start, start) for start, end in self._ends.items() if end - start >= size]
        return min(candidates)[1] if candidates else None

    def first(self, size: int, unit: int = 1) -> int | None:
        """Return the first start of `size` numbers that is a multiple of `unit`; None without one."""
        starts = (
            -(-start // unit) * unit for start, end in self._ends.items() if -(-start // unit) * unit + size <= end
        )
        return min(starts, default=None)

    def ends_at(self, end: int) -> bool:
        """Return whether a range has this end."""
        return end in self._starts

    def widest_first(self) -> list[tuple[int, int]]:
        """Return start and end of each range, widest first."""
        return sorted(self._ends.items(), key=lambda item: (item[0] - item[1], item[0]))
