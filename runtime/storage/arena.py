"""Memory of the experts: a range of addresses of which a part has pages, and pages that move within it."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded

_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
_MREMAP_FLAGS = 1 | 2 | 4  # MAYMOVE, FIXED and DONTUNMAP: move to a fixed address, the source stays mapped (Linux 5.7)


def map_anonymous(size_bytes: int, what: str, huge_pages: bool) -> tuple[mmap.mmap, np.ndarray]:
    """Map zeroed memory. Returns the mapping and a view of it, uint8 [size_bytes].

    what: the use of the memory, for the error.
    huge_pages: for memory that is filled completely and stays.
    Raises MemoryBudgetExceeded if the system refuses.

    Huge pages read 5 to 8 % faster (fewer misses of the address cache). One touched byte makes up to 2 MiB resident.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=flags)
    except OSError as error:
        raise MemoryBudgetExceeded(
            f"the system refuses {size_bytes} bytes of addresses for {what}: {error.strerror}",
            "take `--io mmap`, or raise the limit of the process's address space",
        ) from error
    # EINVAL: the system has no huge pages.
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return mapped, np.frombuffer(mapped, np.uint8)


def find_page_mover() -> Callable[[int, int, int], bool] | None:
    """Return move(source, target, size_bytes), or None if the system cannot move pages.

    move brings the pages of one range of a mapping to another range, both page-aligned. Afterwards the source has no
    pages, and the old pages of the target are gone. It returns False, with nothing done, if the system refuses.

    A moved page is neither freed nor zeroed again. A move of 3.4 MiB takes 20 us if nothing else runs. While kernels
    run it takes 0.15 to 0.3 ms, and every thread stops. To free the pages and read into new ones takes 1 ms.
    """
    try:
        mremap = ctypes.CDLL(None, use_errno=True).mremap
    except (AttributeError, OSError, TypeError):
        return None
    mremap.restype = ctypes.c_void_p
    mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def move(source: int, target: int, size_bytes: int) -> bool:
        return bool(mremap(source, size_bytes, size_bytes, _MREMAP_FLAGS, target) == target)

    return move


def find_page_maker() -> Callable[[int, int], bool]:
    """Return make(address, size_bytes), which allocates cleared pages now, as a write to each page would.

    make returns False, with nothing or a part done, if the system refuses or lacks this advice (before Linux 5.14).
    It releases the interpreter lock.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return lambda address, size_bytes: False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def make(address: int, size_bytes: int) -> bool:
        return bool(madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0)

    return make


HUGE_PAGE_BYTES = 2 << 20
# Threads that map or unmap memory wait until a range is cleared. Ranges of 32 MiB would delay loading by half a
# second.
CLEARED_AT_ONCE_BYTES = HUGE_PAGE_BYTES
# Linux only. Other systems refuse them or lack them.
_HUGE, _NOT_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14), getattr(mmap, "MADV_NOHUGEPAGE", 15)
_COLD = 20  # Linux 5.4; the module mmap has no name for it


class Arena:
    """Anonymous memory for `Places`. A page is resident if it was touched and neither moved nor given back.

    view: uint8 [size_bytes], aligned to a huge page.
    Raises MemoryBudgetExceeded if the system refuses.
    """

    def __init__(self, size_bytes: int, what: str) -> None:
        # A huge page under one expert would make part of the next one resident. Only whole gaps use huge pages.
        self._mapped, whole = map_anonymous(size_bytes + HUGE_PAGE_BYTES, what, huge_pages=False)
        self._first = -whole.__array_interface__["data"][0] % HUGE_PAGE_BYTES
        self.view = whole[self._first : self._first + size_bytes]
        self._address = self.view.__array_interface__["data"][0]
        self._move = find_page_mover()
        # The system moves no range across a point where memory from different places meets
        self._borders = [0, size_bytes]

    def expect(self, start: int, end: int, is_whole: bool) -> None:
        """Prepare a range that will be used.

        is_whole: whether the range fills huge pages completely.
        """
        self._advise(_HUGE if is_whole else _NOT_HUGE, start, end)

    @contextlib.contextmanager
    def cleared_meanwhile(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Run a `with` block while a thread allocates the pages of ranges, as far as it gets in that time.

        Without it, the first read into a page waits until the system clears the page, which takes a CPU from decoding.
        No other method may be called meanwhile.
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
            with contextlib.suppress(RuntimeError):  # if the system refuses a thread, reads allocate the pages
                thread.start()
        try:
            yield
        finally:
            is_over.set()
            if thread.ident is not None:
                thread.join()

    def give_back(self, start: int, end: int) -> None:
        """Give back the pages of a range of whole pages. Raises ExecutionError if the system refuses."""
        try:
            self._mapped.madvise(mmap.MADV_DONTNEED, self._first + start, end - start)
        except OSError as error:
            raise ExecutionError(
                f"the system does not take back the memory of experts (madvise): {error.strerror}",
                "allow the call in the sandbox, or give `--memory` for all experts",
            ) from error

    def abandon(self, start: int, end: int) -> None:
        """Give back a range that an adjacent huge page must not make resident.

        A part of a huge page is charged to the control group until the page is split. The advice `_COLD` splits it.
        """
        self._advise(_NOT_HUGE, start, end)
        self._advise(_COLD, start, end)
        self.give_back(start, end)

    def pieces(self, start: int, end: int) -> int:
        return len(self._pieces(start, end))

    def move(self, source: int, target: int, size_bytes: int) -> None:
        """Move pages to addresses that have none. If the system cannot move them, new pages are used there."""
        for start, end in self._pieces(source, source + size_bytes):
            place = target + start - source
            if self._move is None or not self._move(self._address + start, self._address + place, end - start):
                self.give_back(start, end)
                self._advise(_NOT_HUGE, place, place + end - start)
            else:
                self._divide(start, end)
                self._divide(place, place + end - start)
                # The borders within the range are gone.
                first, last = (
                    bisect.bisect_right(self._borders, place),
                    bisect.bisect_left(self._borders, place + end - start),
                )
                del self._borders[first:last]

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return a range, divided at the borders in it."""
        inner = self._borders[bisect.bisect_right(self._borders, start) : bisect.bisect_left(self._borders, end)]
        return list(zip([start, *inner], [*inner, end], strict=True))

    def _divide(self, *places: int) -> None:
        for place in places:
            at = bisect.bisect_left(self._borders, place)
            if at == len(self._borders) or self._borders[at] != place:
                self._borders.insert(at, place)

    def _advise(self, advice: int, start: int, end: int) -> None:
        with contextlib.suppress(OSError):
            self._mapped.madvise(advice, self._first + start, end - start)
        self._divide(start, end)
