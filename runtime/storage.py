"""Where expert bytes come from, and the memory they land in.

An expert takes the place of one that was given up (`places`): pages stay where they are, and huge ones hold them. A
read of 3.4 MiB into pages of 4 KiB is 864 pieces to the system, into huge ones a few, and up to twice as fast
(docs/experiments.md, Places). Reads land in place: no copy lies between the file and the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np

from moec.manifests.errors import StorageReadFailed

from .arena import HUGE_PAGE_BYTES, Arena
from .bundle import Bundle
from .bundle_files import BundleFile, remedy_of
from .options import IoMode
from .places import Places, span_bytes
from .read_runs import successors
from .read_verifier import ReadVerifier

Follow = Callable[[int, np.ndarray], None]
"""An expert and its bytes, uint8 [size_bytes]."""
HandOvers = tuple[list[tuple[int, int]], list[int]]
"""Experts that gave their place to another of their size, in order, each with the other; experts that left theirs."""
_RETRY_FLAGS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR)  # the last two: no `/proc`


class ExpertStorage(Protocol):
    """Blocks of expert bytes; indices count what the manifest's expert files hold, in order.

    successors: per expert the one that a read which goes on brings as well, as in `read_runs`.
    """

    mode: str
    successors: list[int]

    def block(self, index: int) -> np.ndarray:
        """uint8 view of one expert, [size_bytes]; content is valid between load and release.

        Under a NativeCache only behind `follow_hand_overs`.
        """

    def load(self, *run: int) -> None:
        """Read an expert, or several that follow one another. Thread-safe for different ones.

        Raises StorageReadFailed, ChecksumMismatch: then none of them can be relied on.
        """

    def release(self, index: int) -> None:
        """Give up the memory of one expert, if it has any."""

    def resize(self, capacity_bytes: int) -> None:
        """Change what experts may take together, at least what those in memory do; the rest goes back to the system."""

    def trim(self) -> None:
        """Give memory that holds no expert back to the system."""

    def made_ready(self, is_wanted: bool) -> AbstractContextManager[None]:
        """Before the first load: memory is made ready in a `with` block that does something else, if it is wanted.

        Files are closed if that fails.
        """

    def on_place(self, follow: Follow) -> None:
        """Who is told where an expert will be, before it is read."""

    def end_pass(self) -> None:
        """After a pass: whether what it computed with was what is in the files. Raises StorageReadFailed."""

    def close(self) -> None:
        """Close files; views stay valid until they are dropped."""


@contextmanager
def closed_on_failure(storage: ExpertStorage) -> Iterator[None]:
    try:
        yield
    except BaseException:
        storage.close()
        raise


def open_storage(bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> ExpertStorage:
    """`auto` is direct reads where the file system allows them, else buffered reads that drop what they read.

    capacity_bytes: what experts may take together, at least the largest; None: all of them.
    """
    if io == "mmap":
        from .mapped_storage import MappedStorage

        return MappedStorage(bundle, verify)
    return ReadStorage(bundle, io, verify, capacity_bytes)


def page_bytes(size_bytes: int) -> int:
    """The bytes of the whole pages that hold so many: experts are multiples of 4096, pages may be larger."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class ReadStorage:
    """Explicit reads into anonymous memory.

    Direct reads bypass the page cache; where the file system refuses them, buffered reads drop their pages at once,
    so the page cache never holds a second copy that the budget would have to count.
    """

    def __init__(self, bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> None:
        self._entries, self._path = bundle.manifest.stored_experts, bundle.path
        self.successors = successors(self._entries)
        self._sizes = [page_bytes(entry.size_bytes) for entry in self._entries]
        self._arena = Arena(span_bytes(self._sizes), "the experts")
        self._places = Places(self._sizes, self._arena, HUGE_PAGE_BYTES)
        self._lock = threading.Lock()  # around the places
        self.resize(sum(self._sizes) if capacity_bytes is None else capacity_bytes)
        self._follow: Follow = lambda index, block: None
        opened = {entry.file: bundle.files[entry.file] for entry in self._entries}
        direct_flag = getattr(os, "O_DIRECT", 0)
        direct = self._reopened(opened, direct_flag) if io in ("auto", "direct") and direct_flag else None
        if direct is None and io == "direct":
            raise StorageReadFailed(f"the file system of `{bundle.path}` refuses direct reads", "use `--io auto`")
        self.mode = "buffered" if direct is None else "direct"
        self._files: dict[str, BundleFile] = opened if direct is None else direct
        self._verifier, self.verifies = ReadVerifier(self._entries, self._files, verify), verify
        if direct is None and hasattr(os, "posix_fadvise"):
            for file in opened.values():
                # What is read ahead of an expert is in no range that is dropped: it would stay in the page cache.
                # Pages that others have read ahead ask for more, whoever comes to them.
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _reopened(self, opened: dict[str, BundleFile], flag: int) -> dict[str, BundleFile] | None:
        """The files once more, for direct reads; None where they are refused. Raises StorageReadFailed."""
        try:
            files = {name: file.reopened(flag) for name, file in opened.items()}
            first = self._entries[0]
            probe = mmap.mmap(-1, mmap.PAGESIZE)
            os.preadv(files[first.file].descriptor, [memoryview(probe)], first.offset_bytes)
        except OSError as error:
            if error.errno in _RETRY_FLAGS:
                return None
            raise StorageReadFailed(
                f"cannot open the expert files of `{self._path}`: {error.strerror}", remedy_of(error)
            ) from error
        return files

    def block(self, index: int) -> np.ndarray:
        """Of an expert that has no place, memory that is not its own."""
        start = self._places.start(index) or 0
        return self._arena.view[start : start + self._entries[index].size_bytes]

    def load(self, *run: int) -> None:
        with self._lock:
            for index in run:
                if self._places.start(index) is None:
                    self._places.put(index)
        for index in run:
            self._follow(index, self.block(index))
        blocks = [self.block(index) for index in run]
        first, total = self._entries[run[0]], sum(len(block) for block in blocks)
        file = self._files[first.file]
        before = self._verifier.begin(first.file)
        try:
            done = file.read_into([block.data for block in blocks], first.offset_bytes)
        except OSError as error:
            raise StorageReadFailed(
                f"`{self._path / first.file}`, expert {first.expert} at byte {first.offset_bytes}: {error.strerror}",
                "check the disk, and copy the bundle again",
            ) from error
        if done < total:
            raise StorageReadFailed(
                f"`{self._path / first.file}` ended at byte {first.offset_bytes + done}, expected "
                f"{total} bytes from {first.offset_bytes} on",
                "copy the bundle again",
            )
        if self.mode == "buffered" and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, first.offset_bytes, total, os.POSIX_FADV_DONTNEED)
        self._verifier.end(run, blocks, before)

    def release(self, index: int) -> None:
        with self._lock:
            self._places.remove(index)

    def source(self, index: int) -> tuple[int, int, int]:
        """File descriptor, offset and size of an expert; descriptor -1 of one that is left out."""
        entry = self._entries[index]
        file = self._files.get(entry.file)
        return -1 if file is None or not entry.size_bytes else file.descriptor, entry.offset_bytes, entry.size_bytes

    def address(self, index: int) -> int:
        """Of the first byte of an expert that has a place."""
        return int(self.block(index).__array_interface__["data"][0])

    def check(self, index: int, address: int) -> None:
        """Compare an expert that was read to an address with its checksum. Raises ChecksumMismatch."""
        start = address - int(self._arena.view.__array_interface__["data"][0])
        self._verifier.compare(index, self._arena.view[start : start + self._entries[index].size_bytes])

    def follow_hand_overs(self, take: Callable[[], HandOvers]) -> None:
        """Take over what became of places while others than `load` gave them out. take: tells it once."""
        with self._lock:
            moved, spare = take()
            for before, index in moved:
                self._places.hand_over(before, index)
            for index in spare:
                self._places.remove(index)

    def resize(self, capacity_bytes: int) -> None:
        whole_pages = min(capacity_bytes, sum(self._sizes)) // mmap.PAGESIZE * mmap.PAGESIZE
        with self._lock:
            self._places.resize(whole_pages)

    def trim(self) -> None:
        with self._lock:
            self._places.trim()

    @contextmanager
    def made_ready(self, is_wanted: bool) -> Iterator[None]:
        gaps = self._places.gaps() if is_wanted else []
        with closed_on_failure(self), self._arena.cleared_meanwhile(gaps):
            yield

    def on_place(self, follow: Follow) -> None:
        self._follow = follow

    def end_pass(self) -> None:
        """What was read is in memory of this process: nobody changes it."""

    def close(self) -> None:
        self._files.clear()


def resident_bytes(view: np.ndarray) -> int:
    """Bytes of a page-aligned mapped range that are in memory (mincore); -1 where the system cannot tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-view.nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    address = view.__array_interface__["data"][0]
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(view.nbytes), vector) != 0:
        return -1
    return sum(byte & 1 for byte in vector) * mmap.PAGESIZE
