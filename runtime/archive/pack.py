"""Bundle folder to one file. Equal bundles give equal archives, for one version of zstandard."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from moec.manifests.bundle import MANIFEST_NAME, PARTIAL_SUFFIX
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import BundleIncomplete, ChecksumMismatch, OptionError
from moec.runtime.bundle import open_bundle

from .files import file_errors, require_free_bytes, sync_directory
from .layout import (
    CHUNK_BYTES,
    COMPRESSED,
    HEADER_BYTES,
    MAX_CHUNKS,
    RECORD_BYTES,
    STORED,
    Chunk,
    Member,
    encode_index,
    members_of,
)

Progress = Callable[[int, int], None]

# A member is sampled in a few pieces spread over it; packed codes show in the first that they do not shrink.
SAMPLE_PIECES = 4
SAMPLE_PIECE_BYTES = 256 << 10
STORE_LEVEL = 0
LEVELS = (3, 9, 19)
# Below this saving the time to decompress is better spent reading the bytes as they are.
LEAST_SAVING = 0.02
# What a stronger level must save over the weaker one, of the raw bytes. On bf16 weights 3 packs 320 MB/s, 9 26 MB/s,
# 19 2 MB/s, and 19 saves 1.2 % more than 3: not worth it. On JSON it saves 5 % or more.
LEAST_GAIN = 0.02
# At 2 MB/s a member of this size takes a minute.
MAX_STRONGEST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class PackedMember:
    """One file of the archive; level 0: stored as it is."""

    name: str
    raw_bytes: int
    stored_bytes: int
    level: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A finished archive."""

    path: Path
    raw_bytes: int
    archive_bytes: int
    members: tuple[PackedMember, ...]


def pack(
    bundle: Path,
    archive: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Packed:
    """Write a bundle into one file; every file's digest is checked on the way. progress: raw bytes done, in all.

    The archive takes its name when it is complete and synced; a failure leaves nothing of it.
    Raises BundleError (a bundle that does not open or has changed), OptionError, DoesNotFit, InputError.
    """
    bundle, archive = Path(bundle), Path(archive)
    with file_errors(archive):
        open_bundle(bundle)
        raw_manifest = (bundle / MANIFEST_NAME).read_bytes()
        members = members_of(decode_manifest(raw_manifest, str(bundle / MANIFEST_NAME)), len(raw_manifest))
        _check_target(bundle, archive, overwrite)
        count = sum(len(member.raw_sizes(chunk_bytes)) for member in members)
        if count > MAX_CHUNKS:
            raise OptionError(f"`{bundle}` takes {count} chunks, an archive holds {MAX_CHUNKS}", "use larger chunks")
        total = sum(member.size_bytes for member in members)
        require_free_bytes(archive.parent, HEADER_BYTES + count * RECORD_BYTES + total)
        beside = archive.with_name(archive.name + PARTIAL_SUFFIX)
        try:
            with beside.open("wb") as file:
                packer = _Packer(file, count, chunk_bytes, total, progress)
                done = tuple(packer.add(bundle, member) for member in members)
                file.seek(0)
                file.write(encode_index(chunk_bytes, len(raw_manifest), packer.chunks))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, archive)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        sync_directory(archive.parent)
    stored = sum(member.stored_bytes for member in done)
    return Packed(archive, total, HEADER_BYTES + count * RECORD_BYTES + stored, done)


def _check_target(bundle: Path, archive: Path, overwrite: bool) -> None:
    if archive.is_dir() or (os.path.lexists(archive) and not overwrite):
        raise OptionError(f"`{archive}` exists", "choose another file or remove it")
    if archive.parent.resolve() == bundle.resolve():
        raise OptionError(f"`{archive}` lies inside the bundle", "choose a file outside it")


class _Packer:
    """Appends members to an archive whose header and index are filled in afterwards."""

    def __init__(
        self, file: BinaryIO, count: int, chunk_bytes: int, total_bytes: int, progress: Progress | None
    ) -> None:
        self._file, self._chunk_bytes = file, chunk_bytes
        self._done, self._total, self._progress = 0, total_bytes, progress
        self.chunks: list[Chunk] = []
        # Zeros are no magic: until the end, this is no archive.
        file.write(bytes(HEADER_BYTES + count * RECORD_BYTES))

    def add(self, bundle: Path, member: Member) -> PackedMember:
        """Append one file. Raises ChecksumMismatch, BundleIncomplete if it is not what the manifest says."""
        digest, stored, path = hashlib.sha256(), 0, bundle / member.name
        with path.open("rb") as source:
            level = choose_level(sample(source, member.size_bytes), member.size_bytes)
            source.seek(0)
            for raw_bytes in member.raw_sizes(self._chunk_bytes):
                raw = source.read(raw_bytes)
                if len(raw) != raw_bytes:
                    raise BundleIncomplete(f"`{path}` became shorter while it was packed", "pack it again")
                digest.update(raw)
                stored += self._append(raw, level)
        if member.sha256 not in (None, digest.hexdigest()):
            raise ChecksumMismatch(f"`{path}` differs from the digest in `{MANIFEST_NAME}`", "copy the bundle again")
        return PackedMember(member.name, member.size_bytes, stored, level)

    def _append(self, raw: bytes, level: int) -> int:
        data, method = raw, STORED
        if level != STORE_LEVEL:
            frame = compress(raw, level)
            if len(frame) < len(raw):
                data, method = frame, COMPRESSED
        self._file.write(data)
        self.chunks.append(Chunk(len(data), method, hashlib.sha256(raw).digest()))
        self._done += len(raw)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return len(data)


def compress(raw: bytes, level: int) -> bytes:
    """One zstandard frame with content size and checksum."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(raw)


def sample(source: BinaryIO, size_bytes: int) -> bytes:
    """Up to SAMPLE_PIECES pieces spread evenly over a file; all of a small one."""
    if size_bytes <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        return source.read(size_bytes)
    pieces = []
    for number in range(SAMPLE_PIECES):
        source.seek((size_bytes - SAMPLE_PIECE_BYTES) * number // (SAMPLE_PIECES - 1))
        pieces.append(source.read(SAMPLE_PIECE_BYTES))
    return b"".join(pieces)


def choose_level(data: bytes, member_bytes: int) -> int:
    """The level for a member, measured on a sample of it.

    Level 3 must save LEAST_SAVING, else the member is stored. Each stronger level must save another LEAST_GAIN of the
    raw bytes over the level chosen so far; the strongest is tried only on members up to MAX_STRONGEST_BYTES.
    """
    weakest, *stronger = LEVELS
    best_bytes = len(compress(data, weakest))
    if best_bytes > (1 - LEAST_SAVING) * len(data):
        return STORE_LEVEL
    level = weakest
    for candidate in stronger:
        if candidate == LEVELS[-1] and member_bytes > MAX_STRONGEST_BYTES:
            break
        size = len(compress(data, candidate))
        if best_bytes - size >= LEAST_GAIN * len(data):
            level, best_bytes = candidate, size
    return level
