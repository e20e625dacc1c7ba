"""Take bytes from installed bundles: links of whole files, copies of experts.

`copy_file_range` lets btrfs and XFS share the blocks of a copy, which FICLONERANGE would ask for by name. Elsewhere the
kernel copies without a way through this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from moec.manifests.files.input_file import UnreadableFile, open_input

from .delta import Copy
from .partial_bundle import PartialBundle

_PART_BYTES = 1 << 20
_NO_RANGES = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)


def copy_all(partial: PartialBundle, copies: tuple[Copy, ...], progress: Callable[[], None]) -> None:
    """Copy what is not there yet. Bytes that differ from their checksum, or cannot be read, are left out.

    progress: called after each copy; it may end the pull with an error.
    Raises OSError if the new file cannot be written.
    """
    buffer = memoryview(bytearray(_PART_BYTES))
    with contextlib.ExitStack() as opened:
        sources: dict[Path, int | None] = {}
        for copy in copies:
            if partial.has(copy.file, copy.start, copy.end):
                continue
            if copy.source not in sources:
                sources[copy.source] = _open_source(copy.source, opened)
            source = sources[copy.source]
            if source is not None and _is_as_stated(source, copy, buffer):
                with partial.opened(copy.file, os.O_WRONLY) as target:
                    is_whole = _copy(source, copy.source_start, target, copy.start, copy.size_bytes, buffer)
                if is_whole:
                    partial.finish(copy.file, copy.start, copy.end)
            progress()


def _open_source(path: Path, opened: contextlib.ExitStack) -> int | None:
    """Open an installed file; None if it cannot be read."""
    try:
        descriptor = open_input(path)
    except UnreadableFile:
        return None
    opened.callback(os.close, descriptor)
    return descriptor


def _is_as_stated(source: int, copy: Copy, buffer: memoryview) -> bool:
    """Return whether bytes can be read and have their checksum."""
    digest, done = xxhash.xxh3_128(), 0
    for block in _parts(source, copy.source_start, copy.size_bytes, buffer):
        digest.update(block)
        done += len(block)
    return done == copy.size_bytes and copy.xxh3 in (None, digest.hexdigest())


def _parts(source: int, start: int, size_bytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a range. It ends early where they cannot be read."""
    done = 0
    while done < size_bytes:
        try:
            count = os.preadv(source, [buffer[: size_bytes - done]], start + done)
        except OSError:
            return
        if count == 0:
            return
        yield buffer[:count]
        done += count


def _copy(source: int, source_start: int, target: int, start: int, size_bytes: int, buffer: memoryview) -> bool:
    """Copy a range. Return False if it cannot be read. Raises OSError if it cannot be written."""
    done, is_able = 0, hasattr(os, "copy_file_range")  # Linux has it
    while is_able and done < size_bytes:
        try:
            count = os.copy_file_range(source, target, size_bytes - done, source_start + done, start + done)
        except OSError as error:
            if error.errno not in _NO_RANGES:
                raise
            count = 0
        is_able = count > 0
        done += count
    for block in _parts(source, source_start + done, size_bytes - done, buffer):
        write_at(target, block, start + done)
        done += len(block)
    return done == size_bytes


def write_at(descriptor: int, data: memoryview, start: int) -> None:
    """Write all bytes at a place of a file. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
