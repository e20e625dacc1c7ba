"""A store in a folder. Nothing appears there before it is complete, and equal files are hard links."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moec.manifests.errors import InputError, StoreFailed
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input
from moec.manifests.files.output_file import (
    WRITING_SUFFIX,
    AtomicFile,
    FileSystem,
    made_folders,
    put_in_place,
    temporary_path,
    write_errors,
)

from ..channel import DEFAULT_CHANNEL, channel_path
from .interface import PART_BYTES, Sent, SourceFile

_PARTIAL = ".partial"
_OWN_NAME = re.compile(r"[0-9a-f]{64}(?:\.sig|\.partial)?|channel")


class FileStore:
    """Files of one model in a folder. A bundle grows in `<digest>.partial`, and `commit` gives it its name.

    One process may write at a time.
    """

    def __init__(self, folder: Path, *, for_writing: bool = False, system: FileSystem | None = None) -> None:
        """system: operations of the file system.

        Raises InputError if the folder is no store. With for_writing, it may be empty or missing.
        """
        _check_folder(folder, for_writing)
        self.address = str(folder)
        self._folder, self._system = folder, system or FileSystem()
        self._known: dict[tuple[int, str], str] = {}
        self._digests: dict[tuple[int, ...], str] = {}
        self._put_names: dict[str, set[str]] = defaultdict(set)
        self._lock: int | None = None

    def size_bytes(self, path: str) -> int | None:
        descriptor = self._open(path)
        if descriptor is None:
            return None
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        place = self._folder / path
        descriptor = self._open(path)
        if descriptor is None:
            raise StoreFailed(f"`{place}` is missing", "push the bundle again")
        try:
            buffer = memoryview(bytearray(min(PART_BYTES, end - start)))
            while start < end:
                count = os.preadv(descriptor, [buffer[: end - start]], start)
                if count == 0:
                    raise StoreFailed(f"`{place}` ends at byte {start}, expected {end}", "push the bundle again")
                yield buffer[:count]
                start += count
        except OSError as error:
            raise StoreFailed(f"`{place}` cannot be read: {error.strerror or error}", "check the disk") from error
        finally:
            os.close(descriptor)

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        try:
            return read_input(self._folder / path, limit_bytes, follow_links=True)
        except UnreadableFile as error:
            if _is_absent(error):
                return None
            raise StoreFailed(f"`{self._folder / path}` {error}", "name another store") from error

    def note(self, path: str, size_bytes: int, sha256: str) -> None:
        self._known.setdefault((size_bytes, sha256), path)

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        """Add a file that never changes, as a hard link if an equal one is known. What is there is read and compared.

        Raises StoreFailed, InputError. Raises DoesNotFit if the disk is full.
        """
        folder, _, name = path.rpartition("/")
        self._put_names[folder].add(name)
        is_there = not again and self._place(path, size_bytes, sha256) is not None
        is_there = is_there or self._link(path, size_bytes, sha256)
        if not is_there:
            growing = self._growing(path)
            with (
                self._writing(growing),
                SourceFile(source, size_bytes, sha256, sent) as content,
                AtomicFile(growing, temporary_path(growing), self._system) as file,
            ):
                for block in content.parts():
                    file.write(block)
        self.note(path, size_bytes, sha256)
        return not is_there

    def commit(self, folder: str) -> None:
        """Give a bundle its name, by one rename. What an interrupted `put` left in it is removed.

        Raises StoreFailed. Raises InputError if a folder is a link or a file.
        """
        growing, target = self._folder / (folder + _PARTIAL), self._folder / folder
        if not is_implied_folder(growing):
            return
        with self._writing(target):
            has_lost_files = is_implied_folder(target)
            for path in list(growing.iterdir()):
                if path.name not in self._put_names[folder]:
                    self._system.remove(path)
                elif has_lost_files:
                    self._system.rename(path, target / path.name)
            if has_lost_files:
                growing.rmdir()
                self._system.sync_directory(target)
            else:
                self._system.sync_directory(growing)
                put_in_place(growing, target, self._system)

    def replace(self, path: str, data: bytes) -> None:
        target = self._folder / path
        with self._writing(target), AtomicFile(target, temporary_path(target), self._system) as file:
            file.write(data)

    def close(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self, path: str) -> int | None:
        """Open a file. Returns None if there is none. Raises StoreFailed."""
        try:
            return open_input(self._folder / path, follow_links=True)
        except UnreadableFile as error:
            if _is_absent(error):
                return None
            raise StoreFailed(f"`{self._folder / path}` {error}", "name another store") from error

    def _growing(self, path: str) -> Path:
        """Return the place of a file before its bundle is committed. Files outside a bundle have one place."""
        folder, _, name = path.rpartition("/")
        return self._folder / (folder + _PARTIAL) / name if folder else self._folder / name

    def _place(self, path: str, size_bytes: int, sha256: str) -> Path | None:
        """Return where a file with this content is, before or after its commit, or None."""
        places = (self._folder / path, self._growing(path))
        return next((place for place in places if self._has(place, size_bytes, sha256)), None)

    def _has(self, place: Path, size_bytes: int, sha256: str) -> bool:
        """Return whether a file has this content. It is read once, also if it gets another name."""
        try:
            status = os.lstat(place)
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            return False
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity not in self._digests:
            self._digests[identity] = _digest(place)
        return self._digests[identity] == sha256

    def _link(self, path: str, size_bytes: int, sha256: str) -> bool:
        """Link a known file with this content. Returns False if there is none, or no link is possible there."""
        known = self._known.get((size_bytes, sha256))
        source = None if known is None else self._place(known, size_bytes, sha256)
        if source is None:
            return False
        growing = self._growing(path)
        with self._writing(growing):
            temporary = temporary_path(growing)
            try:
                self._system.link(source, temporary)
            except OSError:  # another disk, a file system without links, or too many links: the bytes are copied
                return False
            try:
                put_in_place(temporary, growing, self._system)
            except BaseException:
                with suppress(OSError):
                    self._system.remove(temporary)
                raise
        return True

    @contextmanager
    def _writing(self, place: Path) -> Iterator[None]:
        """Make missing folders and keep other writers out. Raises StoreFailed, DoesNotFit.

        Raises InputError if a link is in the place of a folder of the store.
        """
        if place.parent != self._folder:
            is_implied_folder(place.parent)
            is_implied_folder(place.parent.with_name(place.parent.name.removesuffix(_PARTIAL)))
        with write_errors(place, StoreFailed), made_folders(place, self._system):
            if self._lock is None:
                self._lock = self._locked()
                # Remove small files that a killed process was writing. `commit` does so in a bundle.
                channels = (self._folder / channel_path(DEFAULT_CHANNEL)).parent
                for folder in (self._folder, *([channels] if is_implied_folder(channels) else [])):
                    for path in folder.glob(f".*{WRITING_SUFFIX}"):
                        self._system.remove(path)
            yield

    def _locked(self) -> int:
        """Lock the folder against other writers and return its descriptor. Raises StoreFailed, OSError."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreFailed(f"another process writes to `{self._folder}`", "wait until it has ended") from error
        except OSError:  # a file system without locks
            pass
        return descriptor


def _check_folder(folder: Path, for_writing: bool) -> None:
    """Raise InputError if a folder is there and no store, or if there is none to read from."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError as error:
        if for_writing:
            return
        raise InputError(f"`{folder}` is missing", "name the folder that `moec push` wrote to") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"`{folder}` is no store: {reason}", "name a folder") from error
    if any(_OWN_NAME.fullmatch(name) for name in names):
        return
    if names or not for_writing:
        content = f"it has `{names[0][:80]}`" if names else "it is empty"
        raise InputError(
            f"`{folder}` is no store of bundles: {content}, and neither a channel nor a bundle named by its digest",
            "name a new folder" if for_writing else "name the folder that `moec push` wrote to",
        )


def _digest(place: Path) -> str:
    """Return the SHA-256 of a file in hex; empty if it cannot be read."""
    try:
        digest = hashlib.sha256()
        with place.open("rb", buffering=0) as file:
            while block := file.read(PART_BYTES):
                digest.update(block)
        return digest.hexdigest()
    except OSError:
        return ""


def _is_absent(error: UnreadableFile) -> bool:
    return isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))
