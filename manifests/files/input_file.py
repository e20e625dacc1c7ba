"""Open and read untrusted files: only regular files, and at most a given number of bytes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_CHUNK_BYTES = 1 << 20


class UnreadableFile(Exception):
    """A file that cannot be used as input. The message follows the name of the file: `is a link`, `is missing`."""


def open_input(path: Path, *, follow_links: bool = False, folder: int | None = None) -> int:
    """Open a regular file for reading and return its descriptor. The caller closes it.

    The kind is checked on the descriptor, so the file cannot be swapped between check and use.
    A pipe without a writer does not block.

    path: the file.
    follow_links: whether the last part of the path may be a symbolic link.
    folder: descriptor of the folder that a relative path starts from; None: the working directory.
    Raises UnreadableFile.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    if not follow_links:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except (OSError, ValueError) as error:
        raise UnreadableFile(_reason(error)) from error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise UnreadableFile(f"is {kind_name(kind)}, expected a regular file")
    return descriptor


def read_input(path: Path, limit_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    The size is checked before reading, and again while reading, because a file can grow.
    Raises UnreadableFile.
    """
    descriptor = open_input(path, follow_links=follow_links)
    try:
        return read_descriptor(descriptor, limit_bytes)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, limit_bytes: int) -> bytes:
    """Return the content of an opened regular file of at most `limit_bytes`, from its first byte.

    The position of the descriptor does not move.
    Raises UnreadableFile.
    """
    size = os.fstat(descriptor).st_size
    if size > limit_bytes:
        raise UnreadableFile(f"has {size} bytes, more than the limit of {limit_bytes}")
    parts = list[bytes]()
    done = 0
    try:
        while chunk := os.pread(descriptor, _CHUNK_BYTES, done):
            parts.append(chunk)
            done += len(chunk)
            if done > limit_bytes:
                raise UnreadableFile(f"has more bytes than the limit of {limit_bytes}")
    except OSError as error:
        raise UnreadableFile(_reason(error)) from error
    return b"".join(parts)


def _reason(error: OSError | ValueError) -> str:
    """Return the part of a sentence that follows the name of a file which cannot be opened or read."""
    number = getattr(error, "errno", None)
    if number == errno.ELOOP:
        return "is a link, expected a regular file"
    if number == errno.ENOENT:
        return "is missing"
    if number == errno.ENXIO:
        return "is a pipe or a socket, expected a regular file"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"cannot be read: {error}"


def kind_name(mode: int) -> str:
    """Return the name of a kind of file, with its article."""
    names = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for is_kind, name in names if is_kind(mode)), "of another kind")
