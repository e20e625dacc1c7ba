"""The memory of the experts: addresses, a part of which holds something, and memory that goes from one to the other."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
from collections.abc import Iterable, Iterator

from .address_space import find_page_maker, find_page_mover, map_anonymous

HUGE_PAGE_BYTES = 2 << 20
# Whoever maps or unmaps memory waits until a range is cleared: ranges of 32 MiB hold loading up for half a second.
CLEARED_AT_ONCE_BYTES = HUGE_PAGE_BYTES
# Linux; other systems refuse or lack them, and go without.
_HUGE, _NOT_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14), getattr(mmap, "MADV_NOHUGEPAGE", 15)
_COLD = 20  # Linux 5.4; the module has no name for it


class Arena:
    """Anonymous memory for `Places`: resident is what has been touched and neither moved nor given back.

    view: uint8 [size_bytes], which begins where a huge page does. Raises MemoryBudgetExceeded if the system refuses.
    """

    def __init__(self, size_bytes: int, what: str) -> None:
        # A huge page under one expert would make its neighbour resident: they are for whole gaps alone.
        self._mapped, whole = map_anonymous(size_bytes + HUGE_PAGE_BYTES, what, huge_pages=False)
        self._first = -whole.__array_interface__["data"][0] % HUGE_PAGE_BYTES
        self.view = whole[self._first : self._first + size_bytes]
        self._address = self.view.__array_interface__["data"][0]
        self._move = find_page_mover()
        self._borders = [0, size_bytes]  # the system moves no range over where memory came from different places

    def expect(self, start: int, end: int, is_whole: bool) -> None:
        """Memory will be wanted here; is_whole: so much of it that huge pages are full."""
        self._advise(_HUGE if is_whole else _NOT_HUGE, start, end)

    @contextlib.contextmanager
    def cleared_meanwhile(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """In a `with` block a thread asks for the pages of ranges, as far as it comes: the first read into a page waits
        for the system to clear it, and decoding beside it loses a processor to that. Nothing here may change meanwhile.
        """
        is_over, make = threading.Event(), find_page_maker()
        parts = [
            (at, min(at + CLEARED_AT_ONCE_BYTES, end))
            for start, end in ranges
            for at in range(start, end, CLEARED_AT_ONCE_BYTES)
        ]

        def clear() -> None:
            for start, end in parts:
                if is_over.is_set() or not make(self._address + start, end - start):
                    return

        thread = threading.Thread(target=clear, name="moec-pages", daemon=True)
        if parts:
            with contextlib.suppress(RuntimeError):  # the system refuses a thread: reads make the pages
                thread.start()
        try:
            yield
        finally:
            is_over.set()
            if thread.ident is not None:
                thread.join()

    def give_back(self, start: int, end: int) -> None:
        """Nothing in these whole pages is needed any more."""
        self._mapped.madvise(mmap.MADV_DONTNEED, self._first + start, end - start)

    def abandon(self, start: int, end: int) -> None:
        """The same, for addresses that a huge page next to them must not make resident.

        A part of a huge page is charged to a control group until the page is split, which this advice does on its way.
        """
        self._advise(_NOT_HUGE, start, end)
        self._advise(_COLD, start, end)
        self.give_back(start, end)

    def pieces(self, start: int, end: int) -> int:
        """How many moves a range takes."""
        return len(self._pieces(start, end))

    def move(self, source: int, target: int, size_bytes: int) -> None:
        """Bring pages to addresses that have none; where the system does not move them, new ones come there."""
        for start, end in self._pieces(source, source + size_bytes):
            place = target + start - source
            if self._move is None or not self._move(self._address + start, self._address + place, end - start):
                self.give_back(start, end)
                self._advise(_NOT_HUGE, place, place + end - start)
            else:
                self._divide(start, end)
                self._divide(place, place + end - start)
                self._unite(place, place + end - start)

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """A range, divided where borders lie in it."""
        inner = self._borders[bisect.bisect_right(self._borders, start) : bisect.bisect_left(self._borders, end)]
        return list(zip([start, *inner], [*inner, end], strict=True))

    def _divide(self, *places: int) -> None:
        for place in places:
            at = bisect.bisect_left(self._borders, place)
            if at == len(self._borders) or self._borders[at] != place:
                self._borders.insert(at, place)

    def _unite(self, start: int, end: int) -> None:
        """What a range was divided into before is one now."""
        borders = self._borders
        del borders[bisect.bisect_right(borders, start) : bisect.bisect_left(borders, end)]

    def _advise(self, advice: int, start: int, end: int) -> None:
        with contextlib.suppress(OSError):
            self._mapped.madvise(advice, self._first + start, end - start)
        self._divide(start, end)
