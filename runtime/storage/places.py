"""Places of experts in a range of addresses, of which only a part has memory.

An expert takes the place of one that was removed. If sizes differ and no such place is wide enough, the memory of
several is moved together, at addresses without memory. Memory in use never moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

MAX_PIECES = 64
"""Most pieces of memory that are moved for one expert. With more, memory is given back and new memory is taken.

A move takes about 20 us, new memory 0.5 ms.
"""


class Memory(Protocol):
    """The memory of addresses. Ranges are whole pages."""

    def move(self, source: int, target: int, size_bytes: int) -> None:
        """Move memory to addresses that have none. Its content may be lost."""

    def pieces(self, start: int, end: int) -> int:
        """Return the number of moves that a range needs, one for each place its memory came from."""

    def expect(self, start: int, end: int, is_whole: bool) -> None:
        """Prepare a range that will be used.

        is_whole: whether the range is a multiple of the unit that the system allocates best.
        """

    def give_back(self, start: int, end: int) -> None:
        """Give back the memory of a range. The range may be used again."""

    def abandon(self, start: int, end: int) -> None:
        """Give back the memory of a range that is unused until the next `expect`."""


def span_bytes(sizes: Sequence[int]) -> int:
    """Return the number of addresses that always suffices.

    Even with all N experts placed, there is room for the largest one between, before and after them.
    """
    return sum(sizes) + (len(sizes) + 1) * max(sizes, default=0)


class Places:
    """Experts at addresses from 0 on.

    sizes: size of each expert, int [N], bytes, whole pages.
    memory: the memory of the addresses.
    unit_bytes: unit of `Memory.expect`.
    Invariants: places do not overlap. The memory of places and gaps together never exceeds the capacity.
    """

    def __init__(self, sizes: Sequence[int], memory: Memory, unit_bytes: int) -> None:
        self._sizes, self._memory, self._unit_bytes = sizes, memory, unit_bytes
        self._starts: dict[int, int] = {}
        self._gaps, self._empty = Ranges(), Ranges()
        self._used_bytes = 0
        self._empty.add(0, span_bytes(sizes))

    @property
    def memory_bytes(self) -> int:
        """Bytes of all places and gaps."""
        return self._used_bytes + self._gaps.total

    def start(self, index: int) -> int | None:
        """Return the first byte of an expert; None if it has no place."""
        return self._starts.get(index)

    def put(self, index: int) -> int:
        """Give an expert a place, and return its first byte.

        The capacity has room for it next to the placed experts.
        """
        size = self._sizes[index]
        start = self._gaps.narrowest(size)
        if start is None:
            start = self._bring_together(size)
        else:
            self._gaps.cut(start, start + size)
        self._starts[index] = start
        self._used_bytes += size
        return start

    def remove(self, index: int) -> None:
        """Remove an expert's place, if it has one. Its memory stays for the next expert."""
        start = self._starts.pop(index, None)
        if start is not None:
            self._gaps.add(start, start + self._sizes[index])
            self._used_bytes -= self._sizes[index]

    def hand_over(self, index: int, heir: int) -> None:
        """Give the place of `index` to `heir`, which has the same size. If `heir` already has a place, swap them."""
        heir_start = self._starts.pop(heir, None)
        self._starts[heir] = self._starts.pop(index)
        if heir_start is not None:
            self._starts[index] = heir_start

    def resize(self, capacity_bytes: int) -> None:
        """Set the most bytes of places and gaps. The placed experts fit in it."""
        self._shed(self.memory_bytes - capacity_bytes)
        free_bytes, unit_bytes = capacity_bytes - self.memory_bytes, self._unit_bytes
        pieces = [free_bytes // unit_bytes * unit_bytes] + [unit_bytes] * (free_bytes // unit_bytes)
        for piece in pieces:  # everything at once, or unit by unit
            start = self._empty.first(piece, unit_bytes) if 0 < piece <= free_bytes else None
            if start is not None:
                self._open(start, start + piece, is_whole=True)
                free_bytes -= piece
        # The rest goes after existing memory, if possible. Then a cache that holds all experts is one range of
        # addresses.
        candidates = [start for start, end in self._empty if end - start >= free_bytes > 0]
        if candidates:
            start = next((start for start in candidates if self._gaps.ends_at(start)), candidates[0])
            self._open(start, start + free_bytes, is_whole=False)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the gaps: ranges within the capacity that hold no expert, by address."""
        return list(self._gaps)

    def trim(self) -> None:
        """Give back the memory of gaps. New memory is allocated when it is used."""
        for start, end in self._gaps:
            self._memory.give_back(start, end)

    def _open(self, start: int, end: int, is_whole: bool) -> None:
        """Turn addresses without memory into a gap."""
        self._empty.cut(start, end)
        self._memory.expect(start, end, is_whole)
        self._gaps.add(start, end)

    def _shed(self, size: int) -> None:
        """Give back `size` bytes of gaps, the narrowest first. At most one gap remains in part."""
        for start, end in reversed(self._gaps.widest_first()):
            if size <= 0:
                return
            first = max(start, end - size)
            self._memory.abandon(first, end)
            self._gaps.cut(first, end)
            self._empty.add(first, end)
            size -= end - first

    def _bring_together(self, size: int) -> int:
        """Move memory of gaps, the widest first, to addresses without memory. The rest is new memory."""
        parts, missing = list[tuple[int, int]](), size
        for start, end in self._gaps.widest_first():
            parts.append((start, min(end, start + missing)))
            missing -= parts[-1][1] - start
            if not missing:
                break
        target = self._empty.first(size)
        if target is None or sum(self._memory.pieces(*gap) for gap in parts) > MAX_PIECES:
            return self._renew(size, missing)
        self._empty.cut(target, target + size)
        filled = target
        for start, end in parts:
            self._memory.move(start, filled, end - start)
            self._gaps.cut(start, end)
            self._empty.add(start, end)
            filled += end - start
        if missing:
            self._memory.expect(filled, filled + missing, is_whole=False)
        return target

    def _renew(self, size: int, missing: int) -> int:
        """Take new memory instead of that of gaps, aligned to a unit if possible."""
        self._shed(size - missing)
        target = self._empty.first(size, self._unit_bytes)
        if target is None:
            target = self._empty.first(size)
        if target is None:  # gaps divide the free addresses
            self._shed(self._gaps.total)
            target = self._empty.first(size)
        if target is None:
            raise RuntimeError(f"no {size} bytes of addresses among those of {len(self._starts)} experts")
        self._empty.cut(target, target + size)
        whole = size // self._unit_bytes * self._unit_bytes if target % self._unit_bytes == 0 else 0
        if whole:
            self._memory.expect(target, target + whole, is_whole=True)
        if whole < size:
            self._memory.expect(target + whole, target + size, is_whole=False)
        return target


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
