"""The front of a packed bundle and its first chunks. Each input is tried with an index digest that fits, too."""

from __future__ import annotations

import hashlib
import io
from itertools import islice

import zstandard

from moec.manifests.errors import BundleError
from moec.runtime.bundle.archive.layout import (
    COMPRESSED,
    HEADER_BYTES,
    RECORD_BYTES,
    STORED,
    Chunk,
    Member,
    check_file_bytes,
    decode_chunk,
    encode_index,
    places_of,
    read_index,
)

_LARGEST_MEMBER_BYTES = 1 << 16
_FIELD_BYTES = HEADER_BYTES - hashlib.sha256().digest_size


def sealed(data: bytes) -> bytes:
    """Return an archive with the correct digest of its index."""
    count = int.from_bytes(data[16:24], "little")
    end = HEADER_BYTES + count * RECORD_BYTES
    if end > len(data):
        return data
    digest = hashlib.sha256(data[:_FIELD_BYTES] + data[HEADER_BYTES:end]).digest()
    return data[:_FIELD_BYTES] + digest + data[HEADER_BYTES:]


def target(data: bytes) -> None:
    for given in (data, sealed(data)):
        try:
            index = read_index(io.BytesIO(given), "an archive", len(given))
            check_file_bytes(index, "an archive", len(given))
            size = min(index.chunk_bytes * index.count, _LARGEST_MEMBER_BYTES)
            for place in islice(places_of(index, [Member("some", size, None)]), 4):
                stored = given[place.offset : place.offset + place.chunk.stored_bytes]
                raw = decode_chunk(stored, place)
                if len(raw) != place.raw_bytes:
                    raise AssertionError(f"{place} has {len(raw)} bytes, expected {place.raw_bytes}")
        except BundleError:
            continue


def seeds() -> list[bytes]:
    raw = b"moec" * 1024
    packed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(raw)
    digest = hashlib.sha256(raw).digest()
    whole = encode_index(4096, len(raw), [Chunk(len(packed), COMPRESSED, digest)]) + packed
    return [whole, encode_index(4096, 1, [Chunk(1, STORED, hashlib.sha256(b"x").digest())]) + b"x"]
