"""Durable writes of all files and folders that the compiler creates. A crash leaves the complete old or new version."""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import partial
from pathlib import Path
from typing import BinaryIO

from moec.manifests.errors import MoecError
from moec.manifests.files.output_file import WRITING_SUFFIX, AtomicFile, FileSystem, write_errors


class Disk(FileSystem):
    """The file system. Every operation that can fail or be interrupted is a method, so that tests can make it fail."""

    def sync_file(self, path: Path) -> None:
        """Sync a file that is already closed. Raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists. Raises OSError."""
        self.remove_tree(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with its content, or a file, if it exists. A link is removed, but never its target."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()

    def append(self, path: Path, size_bytes: int) -> BinaryIO:
        """Open a file to write after its first bytes. The others are cut off. It is made if absent. Raises OSError."""
        file = path.open("ab")
        if file.tell() != size_bytes:
            file.truncate(size_bytes)
        return file

    def create(self, path: Path) -> StreamingFile:
        """Create a file that appears at `path` only when it is complete."""
        return StreamingFile(self, path)

    def write_file(self, path: Path, data: bytes) -> None:
        """Replace the content of `path`. Afterwards it holds the old content or the new, never a mixture.

        Raises OSError; translate it with `disk_errors`.
        """
        with self.create(path) as file:
            file.write(data)


disk_errors = partial(write_errors, kind=MoecError)
"""Translates errors of the disk on the compiler's own files into DiskFull or MoecError, which name the path."""


class StreamingFile(AtomicFile):
    """A file of the compiler that is hashed while it is written. It overwrites the remains of a killed run.

    After an error the new content is removed, and an existing file of the same name is unchanged.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        super().__init__(path, path.with_name(path.name + WRITING_SUFFIX), disk)
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes written so far."""
        return self._digest.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises OSError."""
        super().write(data)
        self._digest.update(data)
        self.size_bytes += len(memoryview(data).cast("B"))

    def __enter__(self) -> StreamingFile:
        super().__enter__()
        return self
