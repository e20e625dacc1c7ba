"""Read experts from files into anonymous memory.

An expert takes the place of one that was removed (`places`), so pages stay where they are and can be huge.
For the system, a read of 3.4 MiB into pages of 4 KiB has 864 pieces, into huge pages a few.
Huge pages make it up to twice as fast (docs/experiments/2026-11.md, 23: Places). Data is read to its final place,
without a copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from moec.manifests.errors import StorageReadFailed

from ..bundle.files import BundleFile, remedy_of
from ..bundle.open_bundle import Bundle
from ..options.runtime import IoMode
from .arena import HUGE_PAGE_BYTES, Arena
from .interface import HandOvers, NativeStorage, Rebind, closed_on_failure, page_bytes
from .places import Places, span_bytes
from .read_runs import next_in_file
from .read_verifier import ReadVerifier

_RETRY_FLAGS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR)  # the last two: no `/proc`


class ReadStorage:
    """Explicit reads into anonymous memory.

    Direct reads bypass the page cache. If the file system refuses them, buffered reads drop their pages at once.
    So the page cache never holds a second copy, which the budget would have to count.

    arena: the memory of the experts.
    """

    def __init__(self, bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> None:
        self._entries, self._path = bundle.manifest.stored_experts, bundle.path
        self.next_in_file = next_in_file(self._entries)
        self._sizes = [page_bytes(entry.size_bytes) for entry in self._entries]
        self.arena = Arena(span_bytes(self._sizes), "the experts")
        self._places = Places(self._sizes, self.arena, HUGE_PAGE_BYTES)
        self._lock = threading.Lock()  # guards the places
        self.resize(sum(self._sizes) if capacity_bytes is None else capacity_bytes)
        self._rebind: Rebind = lambda index, block: None
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
                # Pages that the system reads ahead are in no range that is dropped, and would stay in the page cache.
                # Pages that other processes have read ahead cause further read-ahead when they are read.
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _reopened(self, opened: dict[str, BundleFile], flag: int) -> dict[str, BundleFile] | None:
        """Open the files again for direct reads. Returns None if they are refused. Raises StorageReadFailed."""
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

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that experts may be in: their places, and the gaps between these."""
        with self._lock:
            return self._places.memory_bytes

    def block(self, index: int) -> np.ndarray:
        """Return a view of one expert. Without a place, it is a view of other memory."""
        start = self._places.start(index) or 0
        return self.arena.view[start : start + self._entries[index].size_bytes]

    def load(self, *run: int) -> None:
        with self._lock:
            for index in run:
                if self._places.start(index) is None:
                    self._places.put(index)
        for index in run:
            self._rebind(index, self.block(index))
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
        entry = self._entries[index]
        file = self._files.get(entry.file)
        return -1 if file is None or not entry.size_bytes else file.descriptor, entry.offset_bytes, entry.size_bytes

    def mapped(self) -> list[tuple[int, int, int, int]]:
        return []

    def address(self, index: int) -> int:
        return int(self.block(index).__array_interface__["data"][0])

    def check(self, index: int, address: int) -> None:
        start = address - int(self.arena.view.__array_interface__["data"][0])
        self._verifier.compare(index, self.arena.view[start : start + self._entries[index].size_bytes])

    def take_hand_overs(self, take: Callable[[], HandOvers]) -> None:
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
        with closed_on_failure(self), self.arena.cleared_meanwhile(gaps):
            yield

    def on_place(self, rebind: Rebind) -> None:
        self._rebind = rebind

    def end_pass(self, resident: Callable[[], np.ndarray]) -> None:
        """Do nothing: the data are in memory of this process, and cannot change."""

    def close(self) -> None:
        self._files.clear()


def open_storage(bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> NativeStorage:
    """Open the storage of a bundle.

    `auto` uses direct reads if the file system allows them. Otherwise it uses buffered reads that drop the page cache.
    capacity_bytes: most bytes of all experts in memory, at least the largest expert; None for all experts.
    """
    if io == "mmap":
        from .mapped_storage import MappedStorage

        return MappedStorage(bundle, verify)
    return ReadStorage(bundle, io, verify, capacity_bytes)
