"""Where experts lie in a range of addresses, only a part of which has memory behind it.

Experts take the places of those that were given up. Where sizes differ and no such place is wide enough, memory of
several is brought together at addresses that have none. Nothing that is in use ever moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .ranges import Ranges

MAX_PIECES = 64
"""Memory in more pieces is given back, and new memory taken: a move costs some 20 us, new memory half a millisecond."""


class Memory(Protocol):
    """What is behind addresses. Ranges are whole pages."""

    def move(self, source: int, target: int, size_bytes: int) -> None:
        """Bring memory to addresses that have none; its content is of no interest."""

    def pieces(self, start: int, end: int) -> int:
        """How many moves a range takes, because its memory came from as many places."""

    def expect(self, start: int, end: int, is_whole: bool) -> None:
        """Memory will be wanted here. is_whole: all of it, in units that the system hands out best."""

    def give_back(self, start: int, end: int) -> None:
        """None is needed here now."""

    def abandon(self, start: int, end: int) -> None:
        """The same, and none will be wanted until it is expected again."""


def span_bytes(sizes: Sequence[int]) -> int:
    """Addresses that always suffice: between and beside N experts that are all placed there is room for the largest."""
    return sum(sizes) + (len(sizes) + 1) * max(sizes, default=0)


class Places:
    """Experts at addresses from 0 on. sizes: bytes per expert, int [N], whole pages; unit_bytes: of `Memory.expect`.

    Invariants: places do not overlap. Memory behind places and gaps, together, never exceeds the capacity.
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
        """The first byte of an expert; None if it has no place."""
        return self._starts.get(index)

    def put(self, index: int) -> int:
        """Give an expert a place, and return its first byte; those that have one leave room for it in the capacity."""
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
        """Give an expert's place up, if it has one; its memory stays for the next."""
        start = self._starts.pop(index, None)
        if start is not None:
            self._gaps.add(start, start + self._sizes[index])
            self._used_bytes -= self._sizes[index]

    def hand_over(self, index: int, heir: int) -> None:
        """An expert's place is another's of its size now, and where that had one, that is the expert's."""
        own = self._starts.pop(heir, None)
        self._starts[heir] = self._starts.pop(index)
        if own is not None:
            self._starts[index] = own

    def resize(self, capacity_bytes: int) -> None:
        """Change what places and gaps may take; what is placed fits in it."""
        self._shed(self.memory_bytes - capacity_bytes)
        left = capacity_bytes - self.memory_bytes
        pieces = [left // self._unit_bytes * self._unit_bytes] + [self._unit_bytes] * (left // self._unit_bytes)
        for piece in pieces:  # all at once, or unit by unit
            start = self._empty.first(piece, self._unit_bytes) if 0 < piece <= left else None
            if start is not None:
                self._open(start, start + piece, is_whole=True)
                left -= piece
        # Behind what is there, if possible: the addresses of all experts of a cache that holds them form one range.
        fitting = [start for start, end in self._empty if end - start >= left > 0]
        if fitting:
            start = next((start for start in fitting if self._gaps.ends_at(start)), fitting[0])
            self._open(start, start + left, is_whole=False)

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges inside the capacity where nobody is, by address."""
        return list(self._gaps)

    def trim(self) -> None:
        """Give the memory of gaps back; it comes again where it is wanted."""
        for start, end in self._gaps:
            self._memory.give_back(start, end)

    def _open(self, start: int, end: int, is_whole: bool) -> None:
        """Addresses without memory become a gap."""
        self._empty.cut(start, end)
        self._memory.expect(start, end, is_whole)
        self._gaps.add(start, end)

    def _shed(self, size: int) -> None:
        """Give the memory of so many bytes of gaps back, the narrowest first: one piece at most is left."""
        for start, end in reversed(self._gaps.widest_first()):
            if size <= 0:
                return
            first = max(start, end - size)
            self._memory.abandon(first, end)
            self._gaps.cut(first, end)
            self._empty.add(first, end)
            size -= end - first

    def _bring_together(self, size: int) -> int:
        """Memory of gaps, the widest first, at addresses that have none; what is missing comes new."""
        parts, missing = list[tuple[int, int]](), size
        for start, end in self._gaps.widest_first():
            parts.append((start, min(end, start + missing)))
            missing -= parts[-1][1] - start
            if not missing:
                break
        target = self._empty.first(size)
        if target is None or sum(self._memory.pieces(*part) for part in parts) > MAX_PIECES:
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
        """New memory instead of what gaps have, at the first whole unit if possible."""
        self._shed(size - missing)
        target = self._empty.first(size, self._unit_bytes)
        if target is None:
            target = self._empty.first(size)
        if target is None:  # gaps lie between
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
