"""Interface between expert cache and storage: blocks of expert bytes, loaded and released by index."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np

Rebind = Callable[[int, np.ndarray], None]
"""Function of an expert and its bytes, uint8 [size_bytes]."""
HandOvers = tuple[list[tuple[int, int]], list[int]]
"""Pairs (expert, heir) of experts that passed their place to another of their size, in order; experts without a
place.
"""


class ExpertStorage(Protocol):
    """Blocks of expert bytes. Indices count the contents of the manifest's expert files, in order.

    mode: how it reads.
    next_in_file: for each expert, the one whose bytes follow in the same file, as in `read_runs`.
    """

    mode: str
    next_in_file: list[int]

    def block(self, index: int) -> np.ndarray:
        """Return a view of one expert, uint8 [size_bytes]. Its content is valid between load and release.

        With a NativeCache, call `take_hand_overs` first.
        """

    def load(self, *run: int) -> None:
        """Read an expert, or several that are adjacent in a file. Thread-safe for different experts.

        Raises StorageReadFailed, ChecksumMismatch. After an error the bytes of all of them are invalid.
        """

    def release(self, index: int) -> None:
        """Release the memory of one expert, if it has any."""

    def resize(self, capacity_bytes: int) -> None:
        """Set the most bytes of all experts, at least those in memory. The rest returns to the system."""

    def trim(self) -> None:
        """Return memory that holds no expert to the system."""

    def made_ready(self, is_wanted: bool) -> AbstractContextManager[None]:
        """Prepare memory before the first load, while a `with` block does other work.

        is_wanted: whether to prepare memory.
        Files are closed if the block fails.
        """

    def on_place(self, rebind: Rebind) -> None:
        """Set the function that receives each expert and its memory before the expert is read."""

    def end_pass(self, resident: Callable[[], np.ndarray]) -> None:
        """Check after a pass that its data are those of the files.

        resident: returns the experts in memory, int64.
        Raises StorageReadFailed, ChecksumMismatch.
        """

    def close(self) -> None:
        """Close files. Views stay valid until they are dropped."""


class NativeStorage(ExpertStorage, Protocol):
    """Storage that a cache in the extension can read from without Python.

    verifies: whether experts are compared with their checksums.
    """

    verifies: bool

    def source(self, index: int) -> tuple[int, int, int]:
        """Return file descriptor, offset and size of an expert. The descriptor of an expert that is left out is -1."""

    def mapped(self) -> list[tuple[int, int, int, int]]:
        """Return a tuple of each expert if files are mapped, else none.

        Its values: address and size of the whole pages of the expert, number of the watch of their mapping, address of
        the expert.
        """

    def address(self, index: int) -> int:
        """Return the address of the first byte of an expert that is in memory."""

    def check(self, index: int, address: int) -> None:
        """Compare an expert that was read to an address with its checksum. Raises ChecksumMismatch."""

    def take_hand_overs(self, take: Callable[[], HandOvers]) -> None:
        """Update the memory of experts after a native cache has evicted some.

        take: returns these changes, each of them once.
        """


@contextmanager
def closed_on_failure(storage: ExpertStorage) -> Iterator[None]:
    try:
        yield
    except BaseException:
        storage.close()
        raise


def page_bytes(size_bytes: int) -> int:
    """Return the bytes of the pages that hold size_bytes. Experts are multiples of 4096 bytes, pages may be larger."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
