"""Operations of a store. Every kind of store has them, and nothing else about a store is known elsewhere.

A file on its way to a store is read once, and compared with its size and digest before the last part is sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from moec.manifests.errors import InputError
from moec.manifests.files.input_file import UnreadableFile, open_input

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


class SourceFile:
    """Bytes of a file that a manifest lists. Use as a context.

    size_bytes: size that it must have.
    """

    def __init__(self, path: Path, size_bytes: int, sha256: str, sent: Sent | None = None) -> None:
        """sha256: digest that it must have, in hex. sent: takes the bytes of each part that `parts` gave away."""
        self._path, self.size_bytes, self._sha256, self._sent = path, size_bytes, sha256, sent
        self._digest, self._hashed = hashlib.sha256(), 0
        self._descriptor: int | None = None

    def __enter__(self) -> SourceFile:
        try:
            self._descriptor = open_input(self._path)
        except UnreadableFile as error:
            raise InputError(f"`{self._path}` {error}", "check the bundle with `moec verify`") from error
        if os.fstat(self._descriptor).st_size != self.size_bytes:
            self.__exit__()
            raise self._changed()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def parts(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to before `end`, at most PART_BYTES at once; None: to the end of the file.

        Ranges come in order; one may be read again. The last part of the file is yielded only if the digest is right.
        Raises InputError.
        """
        stop = self.size_bytes if end is None else end
        while start < stop:
            block = self._read(start, min(PART_BYTES, stop - start))
            yield block
            start += len(block)
            if self._sent is not None:
                self._sent(len(block))
        if self.size_bytes == 0:
            self._check()

    def _read(self, start: int, count: int) -> bytes:
        if self._descriptor is None:
            raise RuntimeError("the file is not open")
        try:
            block = os.pread(self._descriptor, count, start)
        except OSError as error:
            raise InputError(f"`{self._path}` cannot be read: {error.strerror or error}", "check the disk") from error
        if not block:
            raise self._changed()
        end = start + len(block)
        if start <= self._hashed < end:
            self._digest.update(memoryview(block)[self._hashed - start :])
            self._hashed = end
        if end == self.size_bytes:
            self._check()
        return block

    def _check(self) -> None:
        if self._hashed != self.size_bytes or self._digest.hexdigest() != self._sha256:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f"`{self._path}` has changed since the bundle was checked", "push again")
