"""Operations of a store. Every kind of store has them, and nothing else about a store is known elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

Sent = Callable[[int], None]
"""Takes the bytes of a file that have been sent since the last call."""

PART_BYTES = 1 << 18
"""Most bytes that `Store.read` yields at once."""


class Store(Protocol):
    """Files of one model, by path. docs/design/shipping.md, Layout on the store, has the paths.

    Several threads may read at the same time. One thread writes.
    address: the place of the model for messages, without credentials.
    """

    address: str

    def size_bytes(self, path: str) -> int | None:
        """Return the size of a file, or None if there is no such file. Raises StoreFailed."""

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a file from `start` to before `end`, in parts of at most PART_BYTES.

        A part is valid until the next one is asked for. The parts have `end - start` bytes together, never more.
        Raises StoreFailed if the store ends early, sends other bytes than were asked for, or takes too long.
        """

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        """Return a whole file, or None if there is no such file.

        Raises StoreFailed, also for a file of more than limit_bytes, of which no more than that is held.
        """

    def note(self, path: str, size_bytes: int, sha256: str) -> None:
        """Learn the content of a file that the store has, so that `put` can take equal bytes from it."""

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        """Add a file that never changes. Return False if the store had its bytes already.

        The store may take the bytes from another file with this digest. A file that is there with them is left alone.
        Where a store does not tell digests, the size decides.
        source: file with the bytes.
        sha256: digest of the bytes in hex. They are compared with it while they are sent.
        sent: called while bytes are sent, if the store can tell.
        again: send the bytes whatever is there.
        Raises StoreFailed. Raises InputError if the source cannot be read or differs from its size or digest.
        """

    def commit(self, folder: str) -> None:
        """Make the files that were put under a folder visible, all at once where the store can. Raises StoreFailed."""

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file, which may exist, in one step. Raises StoreFailed."""

    def close(self) -> None:
        """Close connections."""
