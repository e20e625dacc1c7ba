"""The archive format, version 1: header, index, chunks. All integers are little-endian and checked on reading.

    offset 0     Header, 64 bytes. Magic `moecpack` (8), version (4), chunk_bytes (4), chunk count (8), bytes of
                 moec.json (8). SHA-256 of the previous 32 bytes and of the index (32).
    offset 64    Index, 40 bytes per chunk. Stored bytes (4), method (1), zero (3), SHA-256 of the raw chunk (32).
    then         Chunks, one after the other. The last one ends the file.

The numbers in parentheses are bytes.
The members are moec.json, then the files it lists, in its order.
Each member is cut into chunks of chunk_bytes. Its last chunk may be shorter, and an empty file has none.
Only moec.json contains names and raw sizes, so no second list can contradict it.
Method 0: the raw bytes.
Method 1: one zstandard frame with content size and checksum, shorter than the raw bytes.
Everything that a reader needs comes before its use, so an archive can be unpacked while it arrives.
"""

from __future__ import annotations

import errno
import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from moec.manifests.bundle import MANIFEST_NAME, BundleManifest
from moec.manifests.errors import (
    BundleIncomplete,
    ChecksumMismatch,
    DiskFull,
    InputError,
    ManifestInvalid,
    UnknownFormatVersion,
)
from moec.manifests.files.limits import MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_MANIFEST_BYTES

MAGIC = b"moecpack"
# Magic of an unfinished archive. Its header has the digest of the manifest instead of that of the index.
UNFINISHED_MAGIC = b"moecpart"
VERSION = 1
CHUNK_BYTES = 8 << 20
MIN_CHUNK_BYTES = 4 << 10
STORED, COMPRESSED = 0, 1
AGAIN = "copy the archive again"
_FIELDS = struct.Struct("<8sIIQQ")
_RECORD = struct.Struct("<IB3s32s")
HEADER_BYTES = _FIELDS.size + hashlib.sha256().digest_size
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk in the index: stored bytes, method, SHA-256 of the raw bytes."""

    stored_bytes: int
    method: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Index:
    """Header and index of an archive.

    records: the index as in the file; each record is checked when it is read.
    """

    chunk_bytes: int
    manifest_bytes: int
    records: bytes

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.records) // RECORD_BYTES

    @property
    def data_offset(self) -> int:
        """Offset of the first chunk."""
        return HEADER_BYTES + len(self.records)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks in order. Raises ManifestInvalid for a method or padding that version 1 does not define."""
        for number, (stored, method, zero, sha256) in enumerate(_RECORD.iter_unpack(self.records)):
            if method not in (STORED, COMPRESSED) or zero != bytes(3):
                raise ManifestInvalid(f"index of the archive, chunk {number}: unknown method {method}", AGAIN)
            yield Chunk(stored, method, sha256)


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive.

    sha256: hex digest of the whole file; None for moec.json, which contains its own.
    """

    name: str
    size_bytes: int
    sha256: str | None

    def chunk_count(self, chunk_bytes: int) -> int:
        """Return the number of its chunks."""
        return -(-self.size_bytes // chunk_bytes)

    def raw_sizes(self, chunk_bytes: int) -> Iterator[int]:
        """Yield the raw bytes of each of its chunks. Lazy, because an untrusted manifest states the size."""
        for start in range(0, self.size_bytes, chunk_bytes):
            yield min(chunk_bytes, self.size_bytes - start)


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a chunk in the archive, and its raw size."""

    member: str
    number: int
    offset: int
    raw_bytes: int
    chunk: Chunk

    @property
    def is_possible(self) -> bool:
        """True if the method can store this many raw bytes in this many stored bytes."""
        if self.chunk.method == STORED:
            return self.chunk.stored_bytes == self.raw_bytes
        return 0 < self.chunk.stored_bytes < self.raw_bytes

    def __str__(self) -> str:
        return f"chunk {self.number} of `{self.member}` (byte {self.offset} of the archive)"


def members_of(manifest: BundleManifest, manifest_bytes: int) -> tuple[Member, ...]:
    """Return the files of an archive in order."""
    listed = (Member(entry.name, entry.size_bytes, entry.sha256) for entry in manifest.files)
    return (Member(MANIFEST_NAME, manifest_bytes, None), *listed)


def encode_record(chunk: Chunk) -> bytes:
    """Encode one record of the index."""
    return _RECORD.pack(chunk.stored_bytes, chunk.method, bytes(3), chunk.sha256)


def encode_unfinished(chunk_bytes: int, raw_manifest: bytes, count: int) -> bytes:
    """Encode the header of an unfinished archive. A run may continue the archive only if this header agrees."""
    fields = _FIELDS.pack(UNFINISHED_MAGIC, VERSION, chunk_bytes, count, len(raw_manifest))
    return fields + hashlib.sha256(raw_manifest).digest()


def encode_index(chunk_bytes: int, manifest_bytes: int, chunks: Sequence[Chunk]) -> bytes:
    """Encode header and index."""
    records = b"".join(map(encode_record, chunks))
    fields = _FIELDS.pack(MAGIC, VERSION, chunk_bytes, len(chunks), manifest_bytes)
    return fields + hashlib.sha256(fields + records).digest() + records


def read_index(archive: BinaryIO, place: str, file_bytes: int) -> Index:
    """Read header and index, and leave the file at the first chunk. Sizes are checked before memory is allocated.

    Raises ManifestInvalid, UnknownFormatVersion, BundleIncomplete, ChecksumMismatch.
    """
    header = archive.read(HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise ManifestInvalid(f"`{place}` is not a moec archive", "expected a file that `moec pack` wrote")
    if len(header) < HEADER_BYTES:
        raise BundleIncomplete(f"`{place}` ends at byte {len(header)}, inside its header", AGAIN)
    _, version, chunk_bytes, count, manifest_bytes = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise UnknownFormatVersion(
            f"`{place}` has archive version {version}, this moec reads {VERSION}", "use a matching moec or pack again"
        )
    is_power = chunk_bytes & (chunk_bytes - 1) == 0
    if not (MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES and is_power):
        raise ManifestInvalid(f"`{place}`: chunks of {chunk_bytes} bytes are out of range", AGAIN)
    if count > MAX_CHUNKS or not 0 < manifest_bytes <= MAX_MANIFEST_BYTES or -(-manifest_bytes // chunk_bytes) > count:
        raise ManifestInvalid(f"`{place}`: {count} chunks, {manifest_bytes} bytes of manifest: out of range", AGAIN)
    end = HEADER_BYTES + count * RECORD_BYTES
    if end > file_bytes:
        raise BundleIncomplete(f"`{place}` has {file_bytes} bytes, its index alone ends at {end}", AGAIN)
    records = archive.read(end - HEADER_BYTES)
    if hashlib.sha256(header[: _FIELDS.size] + records).digest() != header[_FIELDS.size :]:
        raise ChecksumMismatch(f"`{place}`: the index differs from its digest", AGAIN)
    return Index(chunk_bytes, manifest_bytes, records)


def check_file_bytes(index: Index, place: str, file_bytes: int) -> None:
    """Check that the file ends with its last chunk. Raises BundleIncomplete, ManifestInvalid."""
    end = index.data_offset + sum(chunk.stored_bytes for chunk in index.chunks())
    if file_bytes < end:
        raise BundleIncomplete(f"`{place}` has {file_bytes} bytes, its index says {end}", AGAIN)
    if file_bytes > end:
        raise ManifestInvalid(f"`{place}` has {file_bytes - end} bytes after its last chunk", AGAIN)


def places_of(index: Index, members: Sequence[Member]) -> Iterator[Place]:
    """Yield every chunk of the given members, from the first chunk on. The caller has compared the counts.

    Raises ManifestInvalid if a stored size is not possible for the raw size.
    """
    chunks, offset = index.chunks(), index.data_offset
    for member in members:
        for number, (raw_bytes, chunk) in enumerate(zip(member.raw_sizes(index.chunk_bytes), chunks, strict=False)):
            place = Place(member.name, number, offset, raw_bytes, chunk)
            if not place.is_possible:
                raise ManifestInvalid(f"{place}: {chunk.stored_bytes} stored bytes for {raw_bytes}", AGAIN)
            yield place
            offset += chunk.stored_bytes


def decode_chunk(stored: bytes, place: Place) -> bytes:
    """Decode the stored bytes of a chunk. Needs at most place.raw_bytes of memory in addition.

    Raises BundleIncomplete if the archive ended.
    Raises ChecksumMismatch if the bytes differ from those that were packed.
    """
    if len(stored) != place.chunk.stored_bytes:
        raise BundleIncomplete(f"the archive ends inside {place}", AGAIN)
    raw = stored
    if place.chunk.method == COMPRESSED:
        try:
            frame = zstandard.get_frame_parameters(stored)
            if frame.content_size != place.raw_bytes or not frame.has_checksum or frame.dict_id:
                raise ChecksumMismatch(f"{place}: the frame declares other contents than the manifest", AGAIN)
            reader = zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)
            raw = reader.decompress(stored, place.raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ChecksumMismatch(f"{place} is damaged: {error}", AGAIN) from error
    if hashlib.sha256(raw).digest() != place.chunk.sha256:
        raise ChecksumMismatch(f"{place} differs from its digest", AGAIN)
    return raw


@contextmanager
def file_errors(place: Path) -> Iterator[None]:
    """Turn a full disk into DiskFull and other refusals of the system into InputError, both naming the place."""
    try:
        yield
    except OSError as error:
        name = error.filename or place
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"the disk of `{place}` is full", "free space and run the command again") from error
        raise InputError(f"`{name}`: {error.strerror or error}", "check path and permissions") from error
