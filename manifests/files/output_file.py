"""Write files: atomically for a regular or new file, directly into a device, a pipe or standard output.

`check_output` checks before the work whether a file can be written, `output_file` writes it.
`AtomicFile` writes the files that a user names and the compiler's own files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from ..errors import DiskFull, InputError, MoecError
from ..sizes import human_bytes
from .mounts import mounts

STDOUT = Path("-")
"""Name of standard output."""
WRITING_SUFFIX = ".writing"
"""Last part of the name of a file that is not complete."""
_MAX_LINKS = 40
_NO_ANONYMOUS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_REMEDY = "name another place, or check its permissions"


class Writer(Protocol):
    """Receiver of a file's content."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append data. Raises OSError."""


class FileSystem:
    """The operations of a write. A subclass may watch each of them or make it fail."""

    def open(self, path: Path) -> BinaryIO:
        """Open a new file. A file that a killed run left there is removed; a link is not followed. Raises OSError."""
        try:
            return path.open("xb")  # mode x follows no link
        except FileExistsError:
            path.unlink()
            return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to an open file. Raises OSError."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Make the content of an open file durable. Raises OSError."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`, which is replaced if it exists. Raises OSError."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises OSError, also if the second name is taken."""
        os.link(source, target)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a folder durable: new, renamed and removed ones. Raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Make a new folder. Raises OSError."""
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Remove a file. Raises OSError."""
        path.unlink()


class AtomicFile:
    """The next content of a file, written from start to end. On a clean exit it is synced and gets the file's name.

    On any other exit it is removed, and an existing file stays unchanged. Permissions and owner of an existing file are
    kept.

    target: the file; if its last part is a link, the link is not followed.
    temporary: the file that grows, in the same folder.
    """

    def __init__(self, target: Path, temporary: Path, system: FileSystem) -> None:
        self._target, self._temporary, self._system = target, temporary, system
        self._file: BinaryIO | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Append data. Raises OSError."""
        if self._file is None:
            raise RuntimeError("the file is not open")
        self._system.write(self._file, data)

    def __enter__(self) -> AtomicFile:
        self._file = file = self._system.open(self._temporary)
        try:
            self._copy_permissions(file)
        except BaseException:
            self._discard(file)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if error is None:
                self._system.sync(file)
                file.close()
                put_in_place(self._temporary, self._target, self._system)
        except BaseException:
            self._discard(file)
            raise
        if error is not None:
            self._discard(file)

    def _copy_permissions(self, file: BinaryIO) -> None:
        """Give the new file the mode of the replaced file, and its owner if the system allows it."""
        try:
            before = os.lstat(self._target)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(before.st_mode):
            return
        now = os.fstat(file.fileno())
        if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
            with contextlib.suppress(OSError):
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
        if stat.S_IMODE(now.st_mode) != stat.S_IMODE(before.st_mode):
            os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))

    def _discard(self, file: BinaryIO) -> None:
        """Close and remove the unfinished file. Later errors are dropped, because the first one is reported."""
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            self._system.remove(self._temporary)


def put_in_place(temporary: Path, target: Path, system: FileSystem | None = None) -> None:
    """Rename a finished and synced file to its final name, and make the name durable. Raises OSError."""
    system = system or FileSystem()
    system.rename(temporary, target)
    system.sync_directory(target.parent)


@dataclass(frozen=True, slots=True)
class _Place:
    """Destination of an output.

    path: the file, with links followed; a device or a pipe, if is_stream; or standard output.
    descriptor: descriptor of this process that the path names, as `/dev/stdout` does; else None.
    """

    path: Path
    is_stream: bool = False
    descriptor: int | None = None

    def open_stream(self) -> BinaryIO:
        """Open for writing without creating, truncating or replacing anything. Raises OSError."""
        if self.descriptor is not None:
            return os.fdopen(os.dup(self.descriptor), "wb")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileExistsError(errno.EEXIST, "a file has taken the place of a device or a pipe")
        return os.fdopen(descriptor, "wb")


@contextmanager
def output_file(path: Path) -> Iterator[Writer]:
    """Write the file that a user named. It appears on a clean exit; before that, and on any failure, nothing changes.

    A link is followed. Missing folders are made.
    A device or a pipe is written to, and `-` is standard output. They get the bytes as they come.
    Raises InputError, DiskFull (the disk is full). Raises BrokenPipeError if a reader has closed the pipe.

    with output_file(path) as file:
        file.write(b"...")
    """
    if path == STDOUT:
        with write_errors("standard output"):
            stream = _standard_output()
            yield stream
            stream.flush()
        return
    place = _find_place(path)
    with write_errors(path):
        if place.is_stream:
            with place.open_stream() as stream:
                yield stream
            return
        with made_folders(place.path), AtomicFile(place.path, temporary_path(place.path), FileSystem()) as file:
            yield file


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user named, with this content. Raises the errors of `output_file`."""
    with output_file(path) as file:
        file.write(data)


def check_output(path: Path) -> None:
    """Check before any work whether `output_file` can write this file. The check leaves nothing.

    Raises InputError, DiskFull.
    """
    if path == STDOUT:
        _standard_output()
        return
    place = _find_place(path)
    if place.descriptor is not None:
        return
    if os.path.lexists(place.path) and not os.access(place.path, os.W_OK):
        is_read_only = bool(os.statvfs(place.path).f_flag & os.ST_RDONLY)
        reason = os.strerror(errno.EROFS if is_read_only else errno.EACCES)
        raise InputError(f"`{path}` cannot be written: {reason}", _REMEDY)
    if not place.is_stream:
        if _is_mount_point(place.path):
            raise InputError(f"`{path}` is a mount point, so it cannot be replaced", "mount its folder instead")
        check_folder(place.path)


def check_folder(path: Path, suffix: str = "") -> None:
    """Check before any work whether a new file or folder can be made, with missing folders above it.

    path: the new file or folder.
    suffix: the longest suffix that is added to its name during the work.
    Raises InputError, DiskFull.
    """
    with write_errors(path):
        if path.name in ("", ".."):
            raise InputError(f"`{path}` names no file or folder of its own", "add a name")
        folder, missing = path.parent, list[str]()
        while not _is_folder(folder):
            if os.path.lexists(folder):
                raise InputError(f"`{folder}` is a link to nothing", _REMEDY)
            if folder == folder.parent:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            missing.append(folder.name)
            folder = folder.parent
        longest = os.pathconf(folder, "PC_NAME_MAX")
        for name in (path.name + suffix, *missing):
            if len(os.fsencode(name)) > longest:
                raise InputError(f"`{path}` cannot be written: a name may have {longest} bytes here", "shorten it")
        _try_new_file(folder)


def require_free_bytes(folder: Path, need_bytes: int) -> None:
    """Raise DiskFull if the file system of a folder has fewer bytes free than needed. The folder need not exist."""
    import shutil  # it loads three compressors, and most commands need none

    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        raise DiskFull(
            f"the disk of `{folder}` has {human_bytes(free)} free, {human_bytes(need_bytes)} are needed",
            "free space, or name another place",
        )


@contextmanager
def made_folders(path: Path, system: FileSystem | None = None) -> Iterator[None]:
    """Make the missing folders above `path`. Folders that are empty at the end are removed. Raises OSError."""
    system = FileSystem() if system is None else system
    new_folders = list[Path]()
    try:
        for folder in reversed(path.parents):
            if not folder.is_dir():
                with contextlib.suppress(FileExistsError):  # another process was first
                    system.make_directory(folder)
                    new_folders.append(folder)
                    system.sync_directory(folder.parent)
        yield
    finally:
        for folder in reversed(new_folders):
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextmanager
def write_errors(place: object, kind: type[MoecError] = InputError) -> Iterator[None]:
    """Turn a full disk into DiskFull, and other errors of the system into `kind`. Both name the place.

    BrokenPipeError passes: a reader that has closed the pipe is no error of the writer.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"the disk of `{place}` is full", "free space, or name another place") from error
        raise kind(f"`{place}` cannot be written: {error.strerror or error}", _REMEDY) from error


def temporary_path(target: Path) -> Path:
    """Return an unused name next to `target`, within the limits of the file system. Raises OSError."""
    mark = f".{os.urandom(4).hex()}{WRITING_SUFFIX}"
    room = os.pathconf(target.parent, "PC_NAME_MAX") - len(mark) - 1
    name = os.fsencode(target.name)[:room].decode("utf-8", "ignore")
    return target.with_name(f".{name}{mark}")


def _find_place(path: Path) -> _Place:
    """Return the destination of a path. Raises InputError if it can never be written."""
    try:
        descriptor = _own_descriptor(path)
        if descriptor is not None:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise InputError(f"`{path}` is open for reading alone", "name another file")
            return _Place(path, is_stream=True, descriptor=descriptor)
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(f"`{path}` cannot be written: {reason}", "name another file") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"`{path}` cannot be written: it is a folder", "name a file")
    if mode is not None and stat.S_ISSOCK(mode):
        raise InputError(f"`{path}` cannot be written: it is a socket", "name a file, a pipe or a device")
    if mode is not None and not stat.S_ISREG(mode):
        return _Place(path, is_stream=True)
    return _Place(Path(os.path.realpath(path)) if path.is_symlink() else path)


def _own_descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path like `/dev/stdout` or `/dev/fd/3` names. Raises OSError."""
    descriptors = f"/proc/{os.getpid()}/fd"
    for _ in range(_MAX_LINKS):
        if path.name.isdecimal() and os.path.realpath(path.parent) == descriptors:
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _standard_output() -> BinaryIO:
    if sys.stdout is None or sys.stdout.closed:
        raise InputError("standard output is closed", "name a file")
    sys.stdout.flush()
    return sys.stdout.buffer


def _is_folder(path: Path) -> bool:
    """Return whether a folder exists. Raises OSError if it is something else, or the system does not say."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"`{path}` is not a folder")
    return True


def _try_new_file(folder: Path) -> None:
    """Make a file in a folder that has no name there, or is removed at once. Raises OSError."""
    try:
        os.close(os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600))
        return
    except OSError as error:
        if error.errno not in _NO_ANONYMOUS_FILES:
            raise
    tried = temporary_path(folder / "moec")
    os.close(os.open(tried, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    tried.unlink()


def _is_mount_point(path: Path) -> bool:
    """Return whether a file is mounted there, as containers do. Such a file can be written, but not replaced."""
    if not path.exists():
        return False
    wanted = os.path.realpath(path)
    return any(mount.point == wanted for mount in mounts())
