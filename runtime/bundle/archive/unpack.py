"""Unpack one file into a bundle folder. A resumed run keeps chunks on disk that match their digest."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from moec.manifests.bundle import MANIFEST_NAME, PARTIAL_SUFFIX, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import (
    BundleError,
    BundleIncomplete,
    ChecksumMismatch,
    DoesNotFit,
    InputError,
    ManifestInvalid,
    OptionError,
)
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.input_file import UnreadableFile, open_input
from moec.manifests.files.output_file import AtomicFile, FileSystem, require_free_bytes
from moec.manifests.progress import Progress
from moec.runtime.bundle.open_bundle import open_bundle

from .layout import (
    AGAIN,
    Index,
    Member,
    Place,
    check_file_bytes,
    decode_chunk,
    file_errors,
    members_of,
    places_of,
    read_index,
)

_UNFINISHED_MANIFEST = f".{MANIFEST_NAME}.writing"


def unpack_bundle(
    archive: Path, target: Path, progress: Progress | None = None, *, max_bytes: int | None = None
) -> int:
    """Write the bundle in an archive to the new folder `target`.

    The files grow in `TARGET.partial`. `moec.json` is written last, then the folder gets its name.
    Files left there by an interrupted run are checked and kept.

    progress: called with (raw bytes done, raw bytes in all).
    max_bytes: most bytes that the archive may unpack to; None: the free space of the disk.
    Returns the bytes that an interrupted run had already written.
    Raises BundleError with the damaged chunk. Unpacked files stay, for a better copy of the archive.
    Raises OptionError, DoesNotFit before anything is written. Raises InputError.
    """
    archive, target = Path(archive), Path(target)
    if os.path.lexists(target):
        raise OptionError(f"`{target}` exists", "choose another folder or remove it")
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    with file_errors(target), _opened(archive) as file:
        index, raw_manifest, manifest = _read_front(file, str(archive), max_bytes)
        if not manifest.certified:
            raise BundleIncomplete(f"`{archive}` holds a bundle that is not certified", "pack a finished bundle")
        members = members_of(manifest, len(raw_manifest))
        expected = sum(member.chunk_count(index.chunk_bytes) for member in members)
        if expected != index.count:
            raise ManifestInvalid(f"`{archive}`: its files take {expected} chunks, the index has {index.count}", AGAIN)
        total = sum(member.size_bytes for member in members)
        _check_size(str(archive), total, max_bytes)
        for _ in places_of(index, members):  # check every size before anything is written
            pass
        kept_on_disk = _look_through(partial, manifest)
        require_free_bytes(target.parent, max(0, total - kept_on_disk))
        partial.mkdir(exist_ok=True)
        for name in (MANIFEST_NAME, _UNFINISHED_MANIFEST):  # without a manifest it is not a valid bundle
            (partial / name).unlink(missing_ok=True)
        unpacker = _Unpacker(file, index.chunk_bytes, partial, total, progress)
        remaining = islice(places_of(index, members), members[0].chunk_count(index.chunk_bytes), None)
        for member in members[1:]:
            unpacker.write(member, remaining)
        unpacker.finish(raw_manifest)
        try:  # as a runtime would
            open_bundle(partial, allow_partial=True).close()
        except BundleError:
            shutil.rmtree(partial)
            raise
        os.rename(partial, target)
        FileSystem().sync_directory(target.parent)
    return unpacker.kept_bytes


def _check_size(place: str, total_bytes: int, max_bytes: int | None) -> None:
    """Raise DoesNotFit if an archive unpacks to more than max_bytes."""
    if max_bytes is not None and total_bytes > max_bytes:
        raise DoesNotFit(
            f"`{place}` unpacks to {total_bytes} bytes, the limit is {max_bytes}",
            f"raise the limit if you trust the archive: --max-size {total_bytes}",
        )


def _opened(archive: Path) -> BinaryIO:
    """Open the archive, which must be a regular file. Raises InputError."""
    try:
        return os.fdopen(open_input(archive, follow_links=True), "rb")
    except UnreadableFile as error:
        raise InputError(f"`{archive}` {error}", "name an archive made by `moec pack`") from error


def _read_front(file: BinaryIO, place: str, max_bytes: int | None) -> tuple[Index, bytes, BundleManifest]:
    """Read and check index and manifest.

    Raises BundleError. Raises DoesNotFit if the manifest alone is too large.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    index = read_index(file, place, file_bytes)
    _check_size(place, index.manifest_bytes, max_bytes)
    check_file_bytes(index, place, file_bytes)
    manifest_member = Member(MANIFEST_NAME, index.manifest_bytes, None)
    parts = [decode_chunk(_read_at(file, item), item) for item in places_of(index, [manifest_member])]
    raw_manifest = b"".join(parts)
    return index, raw_manifest, decode_manifest(raw_manifest, f"{place}: {MANIFEST_NAME}")


def _read_at(file: BinaryIO, place: Place) -> bytes:
    # Seek only when needed, so that an archive that is read from the start can be a stream.
    if file.tell() != place.offset:
        file.seek(place.offset)
    return file.read(place.chunk.stored_bytes)


def _look_through(partial: Path, manifest: BundleManifest) -> int:
    """Return the bytes that an interrupted run left in the folder, 0 if there is none.

    Raises InputError if a link is in its place. Raises OptionError if it holds a file that is not part of this archive.
    """
    if not is_implied_folder(partial):
        return 0
    names = {entry.name for entry in manifest.files} | {MANIFEST_NAME, _UNFINISHED_MANIFEST}
    kept_bytes = 0
    for path in sorted(partial.iterdir()):
        if path.name not in names or path.is_symlink() or not path.is_file():
            raise OptionError(f"`{path}` is not part of this archive", f"remove `{partial}`")
        kept_bytes += path.stat().st_size
    return kept_bytes


class _Unpacker:
    """Writes members into a folder, chunk by chunk. Each chunk is checked before it is written."""

    def __init__(
        self, archive: BinaryIO, chunk_bytes: int, partial: Path, total_bytes: int, progress: Progress | None
    ) -> None:
        self._archive, self._chunk_bytes, self._partial = archive, chunk_bytes, partial
        self._done, self._total, self._progress = 0, total_bytes, progress
        self.kept_bytes = 0

    def write(self, member: Member, places: Iterator[Place]) -> None:
        """Write and sync one file with the next chunks of `places`. Raises BundleError, OSError."""
        digest, path = hashlib.sha256(), self._partial / member.name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            for place in islice(places, member.chunk_count(self._chunk_bytes)):
                digest.update(self._write_chunk(file, place))
            file.truncate(member.size_bytes)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != member.sha256:
            raise ChecksumMismatch(f"`{member.name}` differs from the digest in `{MANIFEST_NAME}`", AGAIN)

    def _write_chunk(self, file: BinaryIO, place: Place) -> bytes:
        start = place.number * self._chunk_bytes
        file.seek(start)
        raw = file.read(place.raw_bytes)
        if len(raw) == place.raw_bytes and hashlib.sha256(raw).digest() == place.chunk.sha256:
            self.kept_bytes += len(raw)
        else:
            raw = decode_chunk(_read_at(self._archive, place), place)
            if self._done + len(raw) > self._total:
                raise ManifestInvalid(f"{place}: the archive unpacks to more than its index says", AGAIN)
            file.seek(start)
            file.write(raw)
        self._step(len(raw))
        return raw

    def finish(self, raw_manifest: bytes) -> None:
        """Write `moec.json`, after all other files are on disk."""
        FileSystem().sync_directory(self._partial)
        with AtomicFile(self._partial / MANIFEST_NAME, self._partial / _UNFINISHED_MANIFEST, FileSystem()) as file:
            file.write(raw_manifest)
        self._step(len(raw_manifest))

    def _step(self, raw_bytes: int) -> None:
        self._done += raw_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
