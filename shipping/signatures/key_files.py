"""Write a pair of key files. Neither replaces a file, and the private one can be read by its owner alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from moec.manifests.errors import InputError
from moec.manifests.files.output_file import AtomicFile, FileSystem, check_folder, temporary_path, write_errors

PRIVATE_MODE, PUBLIC_MODE = 0o600, 0o644
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


class NewFileSystem(FileSystem):
    """A file system whose files are new: they get a mode from their first byte on, and replace nothing.

    mode: permissions of the next file.
    placed: files that have their name.
    """

    def __init__(self) -> None:
        self.mode = PRIVATE_MODE
        self.placed = list[Path]()

    def open(self, path: Path) -> BinaryIO:
        """Open a new file with the mode. Raises OSError."""
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode), "wb")

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`. Raises FileExistsError if `target` exists, and OSError."""
        try:
            os.link(source, target)  # a rename would replace a file that another process made meanwhile
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(source, target)
        self.placed.append(target)
        source.unlink(missing_ok=True)


def write_key_files(
    private: Path, private_pem: bytes, public: Path, public_pem: bytes, system: NewFileSystem | None = None
) -> None:
    """Write two new files, the private one first. A run that is killed leaves no half file.

    Raises InputError if one of them exists, or cannot be written. Raises DoesNotFit. No file is left then.
    """
    system = NewFileSystem() if system is None else system
    for path in (private, public):
        if os.path.lexists(path):
            raise _exists(path)
        check_folder(path)
    try:
        _write(private, private_pem, PRIVATE_MODE, system)
        _write(public, public_pem, PUBLIC_MODE, system)
    except BaseException:
        for path in system.placed:
            path.unlink(missing_ok=True)
        raise


def _write(path: Path, data: bytes, mode: int, system: NewFileSystem) -> None:
    system.mode = mode
    try:
        with write_errors(path), AtomicFile(path, temporary_path(path), system) as file:
            file.write(data)
    except InputError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise _exists(path) from error
        raise


def _exists(path: Path) -> InputError:
    return InputError(f"`{path}` exists, and a key is never replaced", "name another file")
