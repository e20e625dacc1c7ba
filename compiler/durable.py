"""The only place where the compiler writes: beside, sync, rename, sync the folder. A crash leaves old or new, whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from moec.manifests.errors import DoesNotFit, MoecError, OptionError

ASIDE_SUFFIX = ".replaced"
_WRITING_SUFFIX = ".writing"


class Disk:
    """The file system; every operation that can fail or be cut off is a method, so that tests can make it fail."""

    def open(self, path: Path) -> BinaryIO:
        return path.open("wb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def remove_tree(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists() or path.is_symlink():
            path.unlink()

    def create(self, path: Path) -> StreamingFile:
        """A new file at `path`, visible there only when it is complete."""
        return StreamingFile(self, path)

    def write_file(self, path: Path, data: bytes) -> None:
        """Replace `path` by these bytes: afterwards it holds the old content or the new, never a mixture."""
        with self.create(path) as file:
            file.write(data)
        self.sync_directory(path.parent)


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn a full disk into DoesNotFit and other refusals of the system into MoecError, both naming the place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(f"the disk of `{place}` is full", "free space, or choose another output") from error
        raise MoecError(f"cannot write `{place}`: {error.strerror or error}", "check path and permissions") from error


class StreamingFile:
    """A file written front to back, hashed in the same pass. Synced and renamed into place on a clean exit only."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._beside = path.with_name(path.name + _WRITING_SUFFIX)
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        """Hex digest of what has been written."""
        return self._digest.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises OSError."""
        if self._file is None:
            raise RuntimeError("the file is not open")
        self._digest.update(data)
        self.size_bytes += len(memoryview(data).cast("B"))
        self._disk.write(self._file, data)

    def __enter__(self) -> StreamingFile:
        self._file = self._disk.open(self._beside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            if error is None:
                self._disk.sync(self._file)
        finally:
            self._file.close()
        if error is None:
            self._disk.rename(self._beside, self._path)
        elif self._beside.exists():
            self._disk.remove_tree(self._beside)


def publish_directory(disk: Disk, partial: Path, final: Path, overwrite: bool = False) -> None:
    """Give a finished folder its name. What stood there is moved aside first and restored if the rename fails.

    Raises OptionError if `final` exists and overwrite is not set; OSError.
    """
    disk.sync_directory(partial)
    aside = final.with_name(final.name + ASIDE_SUFFIX)
    if final.exists():
        if not overwrite:
            raise OptionError(f"`{final}` exists", "choose another output or add `--overwrite`")
        disk.remove_tree(aside)
        disk.rename(final, aside)
    try:
        disk.rename(partial, final)
    except BaseException:
        if aside.exists() and not final.exists():
            disk.rename(aside, final)
        raise
    disk.sync_directory(final.parent)
    if aside.exists():
        disk.remove_tree(aside)


def recover_replaced(disk: Disk, final: Path) -> None:
    """Put back what a crash between the two renames of `publish_directory` left aside."""
    aside = final.with_name(final.name + ASIDE_SUFFIX)
    if aside.exists():
        if final.exists():
            disk.remove_tree(aside)
        else:
            disk.rename(aside, final)


def require_free_bytes(folder: Path, need_bytes: int) -> None:
    """Raise DoesNotFit if the file system of `folder` has less than need_bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise DoesNotFit(
            f"the disk of `{folder}` has {free} bytes free, the bundle needs {need_bytes}",
            "free space, or choose another output",
        )
