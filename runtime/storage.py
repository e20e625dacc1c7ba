"""Where expert bytes come from, and the memory they land in.

All experts share one address range, laid out like the expert files; residency is which pages of it are populated.
An expert therefore has one fixed address for the life of the engine, a slot never fragments, and giving an expert up
hands its pages to the next that is read. Reads land in place: no copy lies between the file and the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from moec.manifests.bundle import ExpertEntry
from moec.manifests.errors import ChecksumMismatch, StorageReadFailed

from .address_space import find_page_mover, map_anonymous
from .bundle import Bundle
from .options import IoMode
from .read_runs import NONE, successors

_RETRY_FLAGS = (errno.EINVAL, errno.EOPNOTSUPP)


class ExpertStorage(Protocol):
    """Blocks of expert bytes; indices count what the manifest's expert files hold, in order.

    successors: per expert the one that a read which goes on brings as well, as in `read_runs`.
    """

    mode: str
    successors: list[int]

    def block(self, index: int) -> np.ndarray:
        """uint8 view of one expert, [size_bytes]; content is valid between load and release."""

    def load(self, *run: int) -> None:
        """Read an expert, or several that follow one another. Thread-safe for different ones.

        Raises StorageReadFailed, ChecksumMismatch: then none of them can be relied on.
        """

    def release(self, index: int) -> None:
        """Give the memory of one expert back to the system."""

    def trim(self) -> None:
        """Give released memory that no read has taken yet back to the system."""

    def close(self) -> None:
        """Close files; views stay valid until they are dropped."""


def open_storage(bundle: Bundle, io: IoMode, verify: bool, evicts: bool = True) -> ExpertStorage:
    """`auto` is direct reads where the file system allows them, else buffered reads that drop what they read.

    evicts: false where the cache holds all that is ever asked for, so that none is released.
    """
    if io == "mmap":
        return MappedStorage(bundle, verify)
    return ReadStorage(bundle, io, verify, evicts)


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


class _Pages:
    """The pages of an arena of places: which places gave theirs up, and who takes them over.

    Released pages stay resident until the next load takes them. They never exceed what is reserved for reads, because
    an expert is released only to make room for one. starts: first byte of each place, and of what follows the last.
    """

    def __init__(self, arena: mmap.mmap, address: int, starts: list[int]) -> None:
        self._arena, self._address, self._starts = arena, address, starts
        self._released: deque[int] = deque()
        self._lock = threading.Lock()
        self._move = find_page_mover()

    def release(self, index: int) -> None:
        """Give up the pages of one place."""
        with self._lock:
            self._released.append(index)

    def take(self, index: int) -> None:
        """Bring released pages to this place, as many as it has bytes, and free the rest of those who gave them."""
        with self._lock:  # also around the moves: a place must not be read into while its pages leave
            if index in self._released:
                self._released.remove(index)
                return
            need = found = self._size(index)
            while self._released and found > 0:
                found -= self._hand_over(self._released.popleft(), index, need if found == need else 0)

    def trim(self) -> None:
        """Free what was released."""
        with self._lock:
            while self._released:
                giver = self._released.popleft()
                self._arena.madvise(mmap.MADV_DONTNEED, self._starts[giver], self._size(giver))

    def _hand_over(self, giver: int, taker: int, wanted_bytes: int) -> int:
        size = self._size(giver)
        moved = min(size, wanted_bytes)
        places = (self._address + self._starts[giver], self._address + self._starts[taker])
        if not moved or self._move is None or not self._move(*places, moved):
            moved = 0
        if moved < size:
            self._arena.madvise(mmap.MADV_DONTNEED, self._starts[giver] + moved, size - moved)
        return size

    def _size(self, index: int) -> int:
        return self._starts[index + 1] - self._starts[index]


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
    """Explicit reads into a sparse anonymous mapping.

    Direct reads bypass the page cache; where the file system refuses them, buffered reads drop their pages at once,
    so the page cache never holds a second copy that the budget would have to count.
    """

    def __init__(self, bundle: Bundle, io: IoMode, verify: bool, evicts: bool = True) -> None:
        self._entries, self._path = bundle.manifest.stored_experts, bundle.path
        self._verifier = _Verifier(bundle, verify)
        self.successors = successors(self._entries)
        sizes = [page_bytes(entry.size_bytes) for entry in self._entries]
        self._starts = [0, *np.cumsum(sizes).tolist()]
        # Where experts are evicted, a huge page would make a neighbour resident, outside the budget.
        self._arena, self._view = map_anonymous(self._starts[-1], "the experts", huge_pages=not evicts)
        self._pages = _Pages(self._arena, self._view.__array_interface__["data"][0], self._starts)
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
        start = self._starts[index]
        return self._view[start : start + self._entries[index].size_bytes]

    def load(self, *run: int) -> None:
        for index in run:
            self._pages.take(index)
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
        self._pages.release(index)

    def trim(self) -> None:
        self._pages.trim()

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
