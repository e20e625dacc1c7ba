"""A bundle that grows in `<id>.partial`: its files, and which of their bytes are there. Threads share it.

Bytes of installed bundles are copied. `copy_file_range` lets btrfs and XFS share the blocks of a copy, which
FICLONERANGE would ask for by name. Elsewhere the kernel copies without a way through this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from moec.manifests.bundle import MANIFEST_NAME, FileEntry
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES
from moec.manifests.files.output_file import WRITING_SUFFIX, AtomicFile, FileSystem

from ..installed.places import Places
from .delta import Copy
from .journal import Intervals, Journal, boot_name, finished_ranges

_OPENING = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
GROWING_MANIFEST = f".{MANIFEST_NAME}{WRITING_SUFFIX}"
"""`moec.json` before all other files are there: a folder without a manifest is no bundle."""
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_PART_BYTES = 1 << 20
_NO_RANGES = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)


def growing_manifest(folder: Path) -> bytes | None:
    """Return the `moec.json` that an earlier pull left in a growing folder, whatever is in it."""
    try:
        return read_input(folder / GROWING_MANIFEST, MAX_MANIFEST_BYTES)
    except UnreadableFile:
        return None


class PartialBundle:
    """Files of a bundle that is not complete.

    A file with a second name is never written to, because the other name may belong to an installed bundle.

    entries: the files in the order of the manifest; their numbers name them.
    done: finished ranges of each file.
    """

    def __init__(
        self, places: Places, name: str, manifest_sha256: str, entries: tuple[FileEntry, ...], system: FileSystem
    ) -> None:
        """Open what an earlier pull left, or begin anew. Raises OSError, InputError."""
        self.entries, self.folder = entries, places.partial(name)
        self._system = system
        self._changed = threading.Condition()
        self.is_stopped = False
        self.done = kept_ranges(places, name, manifest_sha256, entries)
        self._unsynced = {number for number, done in enumerate(self.done) if done.size_bytes}
        if not is_implied_folder(self.folder):
            system.make_directory(self.folder)
        # Remove what is no file of this bundle.
        expected = {entry.name for entry in self.entries} | {GROWING_MANIFEST}
        for foreign in os.listdir(self.folder):
            mode = os.lstat(self.folder / foreign).st_mode
            if stat.S_ISDIR(mode):
                shutil.rmtree(self.folder / foreign)
            elif foreign not in expected or not stat.S_ISREG(mode):
                self._system.remove(self.folder / foreign)
        self._journal = Journal(places.journal(name), manifest_sha256, boot_name())

    def __enter__(self) -> PartialBundle:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._journal.close()

    @property
    def done_bytes(self) -> int:
        with self._changed:
            return sum(done.size_bytes for done in self.done)

    def missing(self, number: int) -> list[tuple[int, int]]:
        with self._changed:
            return self.done[number].missing(self.entries[number].size_bytes)

    def has(self, number: int, start: int, end: int) -> bool:
        with self._changed:
            return self.done[number].has(start, end)

    def link(self, number: int, source: Path) -> bool:
        """Give an installed file a name in this bundle. Return False if no link is possible there. Raises OSError."""
        entry, is_linked = self.entries[number], False
        target = self.folder / entry.name
        with contextlib.suppress(FileNotFoundError):
            is_linked = os.path.samestat(os.lstat(target), os.lstat(source))
            if not is_linked:
                self._system.remove(target)
        if not is_linked:
            try:
                self._system.link(source, target)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return False
                raise
        with self._changed:
            self.done[number].add(0, entry.size_bytes)  # not in the journal: links are made again
            self._changed.notify_all()
        return True

    def prepare(self, number: int) -> None:
        """Make a file of the right size that no installed bundle shares. Finished ranges stay. Raises OSError."""
        entry = self.entries[number]
        path = self.folder / entry.name
        with contextlib.suppress(FileNotFoundError):
            if _is_own(os.lstat(path), entry.size_bytes):
                return
            self._system.remove(path)
        self.reset(number)
        with self.opened(number, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            os.ftruncate(descriptor, entry.size_bytes)

    @contextlib.contextmanager
    def opened(self, number: int, flags: int) -> Iterator[int]:
        """Open a prepared file and yield its descriptor. Raises OSError."""
        descriptor = os.open(self.folder / self.entries[number].name, flags | _OPENING, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def finish(self, number: int, start: int, end: int) -> None:
        """Note a range that was written. Raises OSError."""
        with self._changed:
            self._journal.finish(number, start, end)
            self.done[number].add(start, end)
            self._unsynced.add(number)
            self._changed.notify_all()

    def reset(self, number: int) -> None:
        """Forget all ranges of a file. Raises OSError."""
        with self._changed:
            self._journal.reset(number)
            self.done[number].clear()

    def wait_beyond(self, number: int, start: int) -> int:
        """Wait until the byte at `start` is there. Return the end of the range that has it, or `start` after `stop`."""
        with self._changed:
            while (end := self.done[number].end_from(start)) == start and not self.is_stopped:
                self._changed.wait()
            return end

    def stop(self) -> None:
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def sync(self) -> None:
        """Make all finished ranges durable. Raises OSError."""
        with self._changed:
            numbers, self._unsynced = self._unsynced, set()
            lines = self._journal.line_count
        for number in sorted(numbers):
            try:
                with self.opened(number, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            except OSError:  # a later sync would succeed, although bytes are lost
                self.reset(number)
                raise
        if numbers:
            with self._changed:
                self._journal.settle(lines)

    def keep_manifest(self, manifest: bytes) -> None:
        """Store `moec.json` for a later pull. Raises OSError."""
        growing = self.folder / GROWING_MANIFEST
        if growing_manifest(self.folder) != manifest:
            with AtomicFile(growing, growing.with_name(f"{GROWING_MANIFEST}{WRITING_SUFFIX}"), self._system) as file:
                file.write(manifest)

    def complete(self, manifest: bytes) -> None:
        """Make everything durable, and add `moec.json`. Raises OSError."""
        self.sync()
        self._system.sync_directory(self.folder)
        with AtomicFile(self.folder / MANIFEST_NAME, self.folder / GROWING_MANIFEST, self._system) as file:
            file.write(manifest)


def kept_ranges(places: Places, name: str, manifest_sha256: str, entries: tuple[FileEntry, ...]) -> list[Intervals]:
    """Return the ranges of each file that an earlier pull left on the disk. Nothing is changed."""
    finished = finished_ranges(places.journal(name), manifest_sha256, boot_name())
    left = list[Intervals]()
    for number, entry in enumerate(entries):
        done = finished.get(number, Intervals())
        is_there = False
        with contextlib.suppress(OSError):
            is_there = _is_own(os.lstat(places.partial(name) / entry.name), entry.size_bytes)
        left.append(done if is_there and done.overlap_bytes(0, entry.size_bytes) == done.size_bytes else Intervals())
    return left


def _is_own(status: os.stat_result, size_bytes: int) -> bool:
    """Return whether a file has the size of a growing one and no second name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == size_bytes


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
