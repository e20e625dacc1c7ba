"""One compile at a time per output. Parent folders are made, and a lock excludes others until the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from moec.manifests.errors import OptionError, TryAgain
from moec.manifests.files.output_file import made_folders

from .durable import Disk, disk_errors
from .journal import Note

LOCK_SUFFIX = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def hold_output(output: Path, disk: Disk, note: Note, option: str = "--output", run: str = "compile") -> Iterator[None]:
    """Keep other compiles away from an output while this one works on it.

    The lock is held on the empty file `NAME.lock` next to the output. The system releases it when the process ends,
    however it ends. Folders above the output are made, and removed again if nothing stays in them.

    output: the folder that the compile writes.
    option: names this folder on the command line.
    run: what works on it, in the error.
    disk: makes the folders.
    note: called with a sentence if the file system has no locks.
    Raises TryAgain if another run holds the lock, MoecError if the disk refuses.
    Raises OptionError if a file is in the way.
    Raises DoesNotFit.
    """
    path = output.with_name(output.name + LOCK_SUFFIX)
    with contextlib.ExitStack() as resources:
        with disk_errors(output):
            resources.enter_context(made_folders(output, disk))
        resources.callback(_release, _lock(path, output, note, option, run), path)
        yield


@contextlib.contextmanager
def hold_measurements(folder: Path | None, disk: Disk, note: Note) -> Iterator[None]:
    """Keep other compiles away from a folder of kept measurements. None: nothing is kept.

    Raises the errors of `hold_output`.
    """
    if folder is None:
        yield
        return
    with hold_output(folder, disk, note, "--measurements"):
        yield


def existing_parent(path: Path) -> Path:
    """Return the nearest existing folder above a path. Raises MoecError if the system rejects the path."""
    parent = path.absolute().parent
    with disk_errors(path):
        while not parent.is_dir() and parent != parent.parent:
            parent = parent.parent
    return parent


def _lock(path: Path, output: Path, note: Note, option: str, run: str) -> int:
    """Open and lock a file that stays at its path while it is locked. Return the descriptor.

    Raises the errors of hold_output.
    """
    with disk_errors(path):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                # Refuse anything but an empty file: the lock is removed at the end, and a user's file must never be.
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_size:
                    raise OptionError(
                        f"`{path}` is in the way and was not left by a compile",
                        f"move it, or choose another `{option}`",
                    )
                _take(descriptor, output, note, option, run)
                if _is_at(descriptor, path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its owner removed it between the two calls


def _take(descriptor: int, output: Path, note: Note, option: str, run: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TryAgain(
            f"another {run} is writing `{output}`", f"wait until it ends, or choose another `{option}`"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        note(f"the disk of `{output}` has no locks: start no second {run} into this output")


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a descriptor refers to the file at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _release(descriptor: int, path: Path) -> None:
    """Remove the file, then the lock. A process that opened it in between sees that it is gone and creates another."""
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    os.close(descriptor)
