"""Expert files mapped into memory: the portable way of reading.

The kernels compute with pages of the files themselves, so a later change of a file changes the data.
A missing page (a shorter file, a disk error) would end the process with SIGBUS in the thread that touches it.
The extension maps zeros there instead and counts the fault, so that every thread continues.
`end_pass` then refuses the result of the pass. Without the extension the system ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from moec.manifests.bundle import ExpertEntry
from moec.manifests.errors import ChecksumMismatch, StorageReadFailed

from .. import kernels
from ..bundle.files import COPY_AGAIN, BundleFile, remedy_of
from ..bundle.open_bundle import Bundle
from .interface import HandOvers, Rebind, closed_on_failure, page_bytes
from .read_runs import NONE
from .read_verifier import ReadVerifier


class MappedFile:
    """One expert file, mapped read-only. The mapping ends with its last view."""

    def __init__(self, file: BundleFile) -> None:
        """Map a file.

        Raises StorageReadFailed if the size has changed since the file was opened. Raises OSError, ValueError.
        """
        self.path, self.identity = file.path, file.identity()
        if self.identity[0] != file.size_bytes:
            raise StorageReadFailed(
                f"`{file.path}` has {self.identity[0]} bytes, expected {file.size_bytes}: it was changed meanwhile",
                COPY_AGAIN,
            )
        self.mapping = mmap.mmap(file.descriptor, file.size_bytes, prot=mmap.PROT_READ)
        try:
            # Read-around would load adjacent experts that no token needs.
            self.mapping.madvise(mmap.MADV_RANDOM)
        except OSError as error:  # a sandbox that refuses the call, without which no expert leaves the memory
            raise StorageReadFailed(
                f"the system refuses advice for the mapped memory of `{file.path}` (madvise): {error.strerror}",
                "take `--io direct` or `--io buffered`",
            ) from error
        self.view = np.frombuffer(self.mapping, np.uint8)
        self._extension = kernels.loaded()
        self._watch: int | None = None
        if self._extension is not None:
            address = self.view.__array_interface__["data"][0]
            self._watch = self._extension.watch_mapping(address, page_bytes(self.view.nbytes))
            # Views of the view refer to it, so the watch ends before the mapping does.
            weakref.finalize(self.view, self._extension.forget_mapping, self._watch).atexit = False

    @property
    def watch(self) -> int:
        """Number of the watch of the mapping; -1 if it is not watched."""
        return -1 if self._watch is None else self._watch

    def state(self, file: BundleFile) -> tuple[int, ...]:
        """Return the row of this file for the extension's `first_changed`."""
        return self.watch, file.descriptor, *self.identity

    def require_pages(self) -> None:
        """Raise StorageReadFailed if a page could not be read since the file was mapped."""
        if self._watch is not None and self._extension is not None and self._extension.has_faulted(self._watch):
            raise StorageReadFailed(
                f"`{self.path}` has become shorter than {len(self.view)} bytes, or cannot be read any more", COPY_AGAIN
            )


@contextmanager
def _missing_pages_first(file: MappedFile) -> Iterator[None]:
    """Report a file that has shrunk instead of a checksum error, because its missing pages read as zeros.

    Raises StorageReadFailed instead of ChecksumMismatch.
    """
    try:
        yield
    except ChecksumMismatch:
        file.require_pages()
        raise


class MappedStorage:
    """Expert files mapped read-only. Released ranges leave the mapping and the page cache."""

    mode = "mmap"

    def __init__(self, bundle: Bundle, verify: bool) -> None:
        self._entries = bundle.manifest.stored_experts
        self.next_in_file = [NONE] * len(self._entries)  # each expert is requested separately
        self._files = {entry.file: bundle.files[entry.file] for entry in self._entries}
        self._verifier, self.verifies = ReadVerifier(self._entries, self._files, verify), verify
        try:
            self._mapped = {name: MappedFile(file) for name, file in self._files.items()}
            states = [self._mapped[name].state(file) for name, file in self._files.items()]
            self._states = np.array(states, np.int64).reshape(-1, 5)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter by now
            raise StorageReadFailed(
                f"cannot map the expert files of `{bundle.path}`: {error}", remedy_of(error)
            ) from error

    def block(self, index: int) -> np.ndarray:
        entry = self._entries[index]
        return self._mapped[entry.file].view[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]

    def load(self, *run: int) -> None:
        for index in run:
            entry, block = self._entries[index], self.block(index)
            file = self._mapped[entry.file]
            before = self._verifier.begin(entry.file)
            file.mapping.madvise(mmap.MADV_WILLNEED, *self._pages(entry))
            np.add.reduce(block[:: mmap.PAGESIZE], dtype=np.int64)
            file.require_pages()
            with _missing_pages_first(file):
                self._verifier.end((index,), (block,), before)

    def source(self, index: int) -> tuple[int, int, int]:
        entry = self._entries[index]
        file = self._files.get(entry.file)
        return -1 if file is None or not entry.size_bytes else file.descriptor, entry.offset_bytes, entry.size_bytes

    def address(self, index: int) -> int:
        return int(self.block(index).__array_interface__["data"][0])

    def mapped(self) -> list[tuple[int, int, int, int]]:
        rows = []
        for index, entry in enumerate(self._entries):
            address, (start, size) = self.address(index), self._pages(entry)
            rows.append((address - entry.offset_bytes + start, size, self._mapped[entry.file].watch, address))
        return rows

    def take_hand_overs(self, take: Callable[[], HandOvers]) -> None:
        for index in take()[1]:
            self.release(index)

    def _pages(self, entry: ExpertEntry) -> tuple[int, int]:
        """Return start and length of the whole pages that hold an expert.

        An adjacent expert in these pages is read again when it is needed.
        """
        start = entry.offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        mapped_bytes = len(self._mapped[entry.file].view)
        return start, min(page_bytes(entry.offset_bytes + entry.size_bytes), mapped_bytes) - start

    def resize(self, capacity_bytes: int) -> None:
        """Do nothing: experts are released one by one, and nothing else is held."""

    def made_ready(self, is_wanted: bool) -> AbstractContextManager[None]:
        return closed_on_failure(self)

    def on_place(self, rebind: Rebind) -> None:
        """Do nothing: experts are where their files are mapped."""

    def release(self, index: int) -> None:
        entry = self._entries[index]
        file = self._mapped[entry.file]
        file.mapping.madvise(mmap.MADV_DONTNEED, *self._pages(entry))
        opened = self._files.get(entry.file)
        if hasattr(os, "posix_fadvise") and opened is not None:
            os.posix_fadvise(opened.descriptor, entry.offset_bytes, entry.size_bytes, os.POSIX_FADV_DONTNEED)

    def trim(self) -> None:
        """Do nothing: released ranges have no memory."""

    def end_pass(self, resident: Callable[[], np.ndarray]) -> None:
        """Refuse a pass if a file that it used has changed since it was mapped.

        If the content may be unchanged (another name or owner), experts in memory are compared again.
        Raises StorageReadFailed, ChecksumMismatch.
        """
        extension = kernels.loaded()
        if extension is not None and self.verifies and extension.first_changed(self._states) < 0:
            return
        for at, (name, opened) in enumerate(self._files.items()):
            file = self._mapped[name]
            file.require_pages()
            if not self.verifies:
                continue
            identity = opened.identity()
            if identity == file.identity:
                continue
            if identity[:2] != file.identity[:2]:
                raise StorageReadFailed(f"`{file.path}` was changed while it was in use", COPY_AGAIN)
            for index in resident().tolist():
                if self._entries[index].file == name and self._entries[index].size_bytes:
                    self.check(index)
            file.identity = identity
            self._states[at] = file.state(opened)

    def check(self, index: int, address: int = 0) -> None:
        with _missing_pages_first(self._mapped[self._entries[index].file]):
            self._verifier.compare(index, self.block(index))

    def close(self) -> None:
        self._files.clear()


def resident_bytes(view: np.ndarray) -> int:
    """Return the bytes of a page-aligned mapped range that are in memory (mincore); -1 if the system cannot tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-view.nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    address = view.__array_interface__["data"][0]
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(view.nbytes), vector) != 0:
        return -1
    return sum(byte & 1 for byte in vector) * mmap.PAGESIZE
