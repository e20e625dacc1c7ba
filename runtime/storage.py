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
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from moec.manifests.bundle import ExpertEntry
from moec.manifests.errors import ChecksumMismatch, StorageReadFailed

from .arena import HUGE_PAGE_BYTES, Arena
from .bundle import Bundle
from .options import IoMode
from .places import Places, span_bytes
from .read_runs import NONE, successors

Follow = Callable[[int, np.ndarray], None]
"""An expert and its bytes, uint8 [size_bytes]."""
HandOvers = tuple[list[tuple[int, int]], list[int]]
"""Experts that gave their place to another of their size, in order, each with the other; experts that left theirs."""
_RETRY_FLAGS = (errno.EINVAL, errno.EOPNOTSUPP)


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

    def close(self) -> None:
        """Close files; views stay valid until they are dropped."""


@contextmanager
def _closed_on_failure(storage: ExpertStorage) -> Iterator[None]:
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
        return MappedStorage(bundle, verify)
    return ReadStorage(bundle, io, verify, capacity_bytes)


class _Verifier:
    """Compares an expert with its checksum the first time it is read; later reads of the same bytes are trusted."""

    def __init__(self, bundle: Bundle, enabled: bool) -> None:
        self._path = bundle.path
        self._pending = set(range(len(bundle.manifest.stored_experts))) if enabled else set()

    def check(self, index: int, entry: ExpertEntry, block: np.ndarray) -> None:
        if index not in self._pending:
            return
        if xxhash.xxh3_128_hexdigest(block.data) != entry.xxh3:
            raise ChecksumMismatch(
                f"`{self._path / entry.file}`, expert {entry.expert} of layer {entry.layer}: bytes differ from "
                "their checksum",
                "copy the bundle again",
            )
        self._pending.discard(index)


def page_bytes(size_bytes: int) -> int:
    """The bytes of the whole pages that hold so many: experts are multiples of 4096, pages may be larger."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _read_into(descriptor: int, buffers: list[memoryview], offset_bytes: int) -> int:
    """Fill buffers, one behind the other, from a place in a file; how many bytes there were."""
    done = 0
    while buffers:
        count = os.preadv(descriptor, buffers, offset_bytes + done)
        if count == 0:
            break
        done += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return done


class ReadStorage:
    """Explicit reads into anonymous memory.

    Direct reads bypass the page cache; where the file system refuses them, buffered reads drop their pages at once,
    so the page cache never holds a second copy that the budget would have to count.
    """

    def __init__(self, bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> None:
        self._entries, self._path = bundle.manifest.stored_experts, bundle.path
        self._verifier, self.verifies = _Verifier(bundle, verify), verify
        self.successors = successors(self._entries)
        self._sizes = [page_bytes(entry.size_bytes) for entry in self._entries]
        self._arena = Arena(span_bytes(self._sizes), "the experts")
        self._places = Places(self._sizes, self._arena, HUGE_PAGE_BYTES)
        self._lock = threading.Lock()  # around the places
        self.resize(sum(self._sizes) if capacity_bytes is None else capacity_bytes)
        self._follow: Follow = lambda index, block: None
        self._files: dict[str, int] = {}
        self.mode = "buffered"
        if io in ("auto", "direct") and self._open_all(bundle.path, getattr(os, "O_DIRECT", 0)):
            self.mode = "direct"
        elif io == "direct":
            raise StorageReadFailed(f"the file system of `{bundle.path}` refuses direct reads", "use `--io auto`")
        elif not self._files and not self._open_all(bundle.path, 0):
            raise StorageReadFailed(f"cannot open the expert files of `{bundle.path}`", "check permissions")

    def _open_all(self, path: Path, flag: int) -> bool:
        files: dict[str, int] = {}
        try:
            for name in sorted({entry.file for entry in self._entries}):
                files[name] = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC | flag)
                if not flag and hasattr(os, "posix_fadvise"):
                    # What is read ahead of an expert is in no range that is dropped: it would stay in the page cache.
                    # Pages that others have read ahead ask for more, whoever comes to them.
                    os.posix_fadvise(files[name], 0, 0, os.POSIX_FADV_DONTNEED)
                    os.posix_fadvise(files[name], 0, 0, os.POSIX_FADV_RANDOM)
            if flag:
                first = self._entries[0]
                probe = mmap.mmap(-1, mmap.PAGESIZE)
                os.preadv(files[first.file], [memoryview(probe)], first.offset_bytes)
        except OSError as error:
            for descriptor in files.values():
                os.close(descriptor)
            if flag and error.errno in _RETRY_FLAGS:
                return False
            raise StorageReadFailed(f"cannot open the expert files of `{path}`: {error.strerror}") from error
        self._files = files
        return True

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
        entries, blocks = [self._entries[index] for index in run], [self.block(index) for index in run]
        first, total = entries[0], sum(entry.size_bytes for entry in entries)
        descriptor = self._files[first.file]
        try:
            done = _read_into(descriptor, [block.data for block in blocks], first.offset_bytes)
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
            os.posix_fadvise(descriptor, first.offset_bytes, total, os.POSIX_FADV_DONTNEED)
        for index, entry, block in zip(run, entries, blocks, strict=True):
            self._verifier.check(index, entry, block)

    def release(self, index: int) -> None:
        with self._lock:
            self._places.remove(index)

    def source(self, index: int) -> tuple[int, int, int]:
        """File descriptor, offset and size of an expert; descriptor -1 of one that is left out."""
        entry = self._entries[index]
        return self._files.get(entry.file, -1), entry.offset_bytes, entry.size_bytes

    def address(self, index: int) -> int:
        """Of the first byte of an expert that has a place."""
        return int(self.block(index).__array_interface__["data"][0])

    def check(self, index: int, address: int) -> None:
        """Compare an expert that was read to an address with its checksum. Raises ChecksumMismatch."""
        start = address - int(self._arena.view.__array_interface__["data"][0])
        entry = self._entries[index]
        self._verifier.check(index, entry, self._arena.view[start : start + entry.size_bytes])

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
        with _closed_on_failure(self), self._arena.cleared_meanwhile(gaps):
            yield

    def on_place(self, follow: Follow) -> None:
        self._follow = follow

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


class MappedStorage:
    """Expert files mapped read-only: the portable way. Released ranges leave the mapping and the page cache."""

    mode = "mmap"

    def __init__(self, bundle: Bundle, verify: bool) -> None:
        self._entries = bundle.manifest.stored_experts
        self.successors = [NONE] * len(self._entries)  # the system is asked for each by itself
        self._verifier = _Verifier(bundle, verify)
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[str, np.ndarray] = {}
        self._files: dict[str, int] = {}
        try:
            for name in sorted({entry.file for entry in self._entries}):
                self._files[name] = os.open(bundle.path / name, os.O_RDONLY | os.O_CLOEXEC)
                self._maps[name] = mmap.mmap(self._files[name], 0, prot=mmap.PROT_READ)
                # Read-around would bring neighbours in that nobody asked for.
                self._maps[name].madvise(mmap.MADV_RANDOM)
                self._views[name] = np.frombuffer(self._maps[name], np.uint8)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            self.close()
            raise StorageReadFailed(f"cannot map the expert files of `{bundle.path}`: {error}") from error

    def block(self, index: int) -> np.ndarray:
        entry = self._entries[index]
        return self._views[entry.file][entry.offset_bytes : entry.offset_bytes + entry.size_bytes]

    def load(self, *run: int) -> None:
        for index in run:
            entry, block = self._entries[index], self.block(index)
            self._maps[entry.file].madvise(mmap.MADV_WILLNEED, *self._pages(entry))
            np.add.reduce(block[:: mmap.PAGESIZE], dtype=np.int64)
            self._verifier.check(index, entry, block)

    def _pages(self, entry: ExpertEntry) -> tuple[int, int]:
        """Start and length of the whole pages that hold an expert; a neighbour in them is read again if asked for."""
        start = entry.offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        return start, min(page_bytes(entry.offset_bytes + entry.size_bytes), len(self._maps[entry.file])) - start

    def resize(self, capacity_bytes: int) -> None:
        """Nothing is held but what is released one by one."""

    def made_ready(self, is_wanted: bool) -> AbstractContextManager[None]:
        return _closed_on_failure(self)

    def on_place(self, follow: Follow) -> None:
        """They are where their files are mapped."""

    def release(self, index: int) -> None:
        entry = self._entries[index]
        self._maps[entry.file].madvise(mmap.MADV_DONTNEED, *self._pages(entry))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._files[entry.file], entry.offset_bytes, entry.size_bytes, os.POSIX_FADV_DONTNEED)

    def trim(self) -> None:
        """Released ranges are gone already."""

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


def resident_bytes(view: np.ndarray) -> int:
    """Bytes of a page-aligned mapped range that are in memory (mincore); -1 where the system cannot tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-view.nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    address = view.__array_interface__["data"][0]
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(view.nbytes), vector) != 0:
        return -1
    return sum(byte & 1 for byte in vector) * mmap.PAGESIZE
