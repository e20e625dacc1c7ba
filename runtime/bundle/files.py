"""Files of a bundle, opened once.

Later reads use the descriptors of the files that were checked, even if their names refer to other files by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.errors import BundleIncomplete, ExecutionError, MoecError, StorageReadFailed
from moec.manifests.files.input_file import UnreadableFile, open_input, read_descriptor

COPY_AGAIN = "copy the bundle again"
_OTHER_FILES = 256
"""Open files of a process in addition to those of bundles: libraries, sockets, pipes. An upper bound."""
_WRONG_KINDS = (None, errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
"""Errors of opening that mean a wrong bundle; None: the file is of another kind."""


FileIdentity = tuple[int, int, int]
"""Values that change with a file's content: size in bytes, time of the last content change, time of any change, ns.

A content change may leave the second value unchanged, because `touch` can set it. It always changes the third one.
"""


class BundleFile:
    """One regular file, open for reading. It is closed with the last reference to it.

    path: its name, for messages.
    descriptor: its file descriptor.
    size_bytes: its size when it was opened.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.size_bytes = os.fstat(descriptor).st_size

    def identity(self) -> FileIdentity:
        """Return the current identity of the content."""
        now = os.fstat(self.descriptor)
        return now.st_size, now.st_mtime_ns, now.st_ctime_ns

    def reopened(self, flags: int) -> BundleFile:
        """Open the same file again with other flags. Raises OSError, also if the system has no `/proc`."""
        again = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        return BundleFile(self.path, again)

    def read(self, limit_bytes: int) -> bytes:
        """Return the whole content.

        Raises BundleIncomplete if it has more than `limit_bytes`. Raises StorageReadFailed.
        """
        try:
            return read_descriptor(self.descriptor, limit_bytes)
        except UnreadableFile as error:
            raise _refusal(self.path, error) from error

    def read_into(self, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        """Fill buffers, one after the other, from an offset on. Returns the number of bytes read. Raises OSError."""
        waiting, done = list(buffers), 0
        while waiting:
            count = os.preadv(self.descriptor, waiting, offset_bytes + done)
            if count == 0:
                break
            done += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]
        return done


class BundleFiles:
    """The opened files of one bundle, by name.

    Names are resolved in the folder that was opened, so the folder cannot be swapped either.
    """

    def __init__(self, path: Path) -> None:
        """path: the folder. Raises BundleIncomplete, StorageReadFailed."""
        self.path = path
        try:
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ENOTDIR):
                raise _no_manifest(path) from error
            raise StorageReadFailed(f"`{path}` cannot be opened: {_text(error)}", remedy_of(error)) from error
        self._folder: int | None = folder
        self._close_folder = weakref.finalize(self, os.close, folder)
        self._close_folder.atexit = False
        self._files: dict[str, BundleFile] = {}

    def names(self) -> list[str]:
        """Return the names in the folder, in no order."""
        try:
            return os.listdir(self._opened_folder())
        except OSError as error:
            raise StorageReadFailed(f"`{self.path}` cannot be listed: {_text(error)}", remedy_of(error)) from error

    def open(self, names: Iterable[str]) -> None:
        """Open regular files of the folder.

        Raises BundleIncomplete if one is missing or of another kind.
        Raises StorageReadFailed if the system refuses.
        """
        new = [name for name in names if name not in self._files]
        _allow_open_files(2 * len(new))  # files with experts are opened a second time for direct reads
        for name in new:
            path = self.path / name
            try:
                descriptor = open_input(Path(name), folder=self._opened_folder())
            except UnreadableFile as error:
                if name == MANIFEST_NAME and getattr(error.__cause__, "errno", None) == errno.ENOENT:
                    raise _no_manifest(self.path) from error
                raise _refusal(path, error) from error
            self._files[name] = BundleFile(path, descriptor)

    def __contains__(self, name: str) -> bool:
        self._opened_folder()
        return name in self._files

    def __getitem__(self, name: str) -> BundleFile:
        """Return an opened file.

        Raises BundleIncomplete for a file that the bundle does not have.
        Raises ExecutionError after `close`.
        """
        self._opened_folder()
        if name not in self._files:
            raise BundleIncomplete(f"`{self.path / name}` is missing", COPY_AGAIN)
        return self._files[name]

    def close(self) -> None:
        """Drop the files. A file with other references stays open until they end."""
        self._folder = None
        self._close_folder()
        self._files = {}

    def _opened_folder(self) -> int:
        if self._folder is None:
            raise ExecutionError(f"the bundle `{self.path}` is closed", "open it again")
        return self._folder


def _allow_open_files(more: int) -> None:
    """Raise this process's limit of open files, as far as allowed, if `more` files would exceed it."""
    try:
        already = len(os.listdir("/proc/self/fd"))
    except OSError:
        already = 0
    with contextlib.suppress(OSError):  # a sandbox that refuses the call: the present limit may suffice
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = already + more + _OTHER_FILES
        if soft == resource.RLIM_INFINITY or needed <= soft:
            return
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _no_manifest(path: Path) -> BundleIncomplete:
    if not os.path.lexists(path):
        return BundleIncomplete(f"`{path}` does not exist, expected the folder of a bundle", "check the path")
    return BundleIncomplete(f"`{path}` has no `{MANIFEST_NAME}`, so it is not a complete bundle", "compile it again")


def _refusal(path: Path, error: UnreadableFile) -> MoecError:
    """Return the error for a file that cannot be opened or read: an error of the bundle or of the system."""
    cause = error.__cause__
    if getattr(cause, "errno", None) in _WRONG_KINDS:
        return BundleIncomplete(f"`{path}` {error}", COPY_AGAIN)
    return StorageReadFailed(f"`{path}` {error}", remedy_of(cause))


def remedy_of(error: BaseException | None) -> str:
    """Return the hint for a file that the system refuses."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (`ulimit -Hn`)"
    return "check the disk" if number == errno.EIO else "check permissions"


def _text(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
