"""What the expert cache asks of a storage: blocks of expert bytes, loaded and released by index."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np

Follow = Callable[[int, np.ndarray], None]
"""An expert and its bytes, uint8 [size_bytes]."""
HandOvers = tuple[list[tuple[int, int]], list[int]]
"""Experts that gave their place to another of their size, in order, each with the other; experts that left theirs."""


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


def page_bytes(size_bytes: int) -> int:
    """The bytes of the whole pages that hold so many: experts are multiples of 4096, pages may be larger."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
