"""Sets of ranges of whole numbers, neighbours joined."""

from __future__ import annotations

from collections.abc import Iterator


class Ranges:
    """Ranges from a start to an end, which is outside. Invariant: no two overlap or touch."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by the start
        self._starts: dict[int, int] = {}  # by the end
        self.total = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Start and end of each, in order."""
        return iter(sorted(self._ends.items()))

    def add(self, start: int, end: int) -> None:
        """One more, which overlaps none."""
        if start >= end:
            return
        self.total += end - start
        start = self._starts.pop(start, start)
        end = self._ends.pop(end, end)
        self._ends[start], self._starts[end] = end, start

    def cut(self, start: int, end: int) -> None:
        """Take away a part of one of them."""
        outer = max(first for first in self._ends if first <= start)
        outer_end = self._ends.pop(outer)
        del self._starts[outer_end]
        self.total -= outer_end - outer
        self.add(outer, start)
        self.add(end, outer_end)

    def narrowest(self, size: int) -> int | None:
        """The start of the narrowest that holds so much, the first of those; None if none does."""
        fitting = [(end - start, start) for start, end in self._ends.items() if end - start >= size]
        return min(fitting)[1] if fitting else None

    def first(self, size: int, unit: int = 1) -> int | None:
        """The first place for so much that begins at a multiple of a unit."""
        starts = (
            -(-start // unit) * unit for start, end in self._ends.items() if -(-start // unit) * unit + size <= end
        )
        return min(starts, default=None)

    def ends_at(self, end: int) -> bool:
        """Whether one of them ends there."""
        return end in self._starts

    def widest_first(self) -> list[tuple[int, int]]:
        """Start and end of each, widest first."""
        return sorted(self._ends.items(), key=lambda item: (item[0] - item[1], item[0]))
