"""A file on its way to a store: read once, and compared with its size and digest before the last part is sent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from moec.manifests.errors import InputError
from moec.manifests.files.input_file import UnreadableFile, open_input

from .interface import PART_BYTES, Sent


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
