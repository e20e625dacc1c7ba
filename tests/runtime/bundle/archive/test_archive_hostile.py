"""Damaged and hostile archives: every one is refused with a BundleError, and no bundle is left."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME
from moec.manifests.codec import DIGEST_FIELD, canonical_json, encode_manifest
from moec.manifests.errors import (
    BundleError,
    BundleIncomplete,
    ChecksumMismatch,
    DoesNotFit,
    ManifestInvalid,
    UnknownFormatVersion,
)
from moec.manifests.files.limits import MAX_CHUNKS, MAX_MANIFEST_BYTES
from moec.runtime.bundle.archive import unpack_bundle
from moec.runtime.bundle.archive.layout import (
    COMPRESSED,
    HEADER_BYTES,
    MIN_CHUNK_BYTES,
    RECORD_BYTES,
    STORED,
    Chunk,
    encode_index,
    read_index,
)
from moec.runtime.bundle.archive.pack import compress
from tests.runtime.tiny_bundle import content, files_and_experts, manifest_of, write_archive

CHUNK = MIN_CHUNK_BYTES
Files = dict[str, bytes]


# Damaged archives


def refused(tmp_path: Path, data: bytes) -> BundleError:
    """Unpack must raise a BundleError and make no bundle."""
    with pytest.raises(BundleError) as caught:
        unpack_bundle(write_archive(tmp_path, data), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial" / MANIFEST_NAME).exists()
    assert caught.value.exit_code == 3
    return caught.value


def boundaries(packed: bytes, tmp_path: Path) -> list[int]:
    """Ends of the header's fields, of the header, of the index and of every chunk."""
    with write_archive(tmp_path, packed).open("rb") as file:
        index = read_index(file, "archive", len(packed))
    ends = [0, 8, 12, 16, 24, 32, HEADER_BYTES, index.data_offset]
    for chunk in index.chunks():
        ends.append(ends[-1] + chunk.stored_bytes)
    return ends


@pytest.mark.gate("G10")
def test_truncation_at_every_boundary(packed: bytes, tmp_path: Path) -> None:
    ends = boundaries(packed, tmp_path)
    sizes = {size for end in ends for size in (end - 1, end, end + 1) if 0 <= size < len(packed)}
    for size in sorted(sizes):
        assert isinstance(refused(tmp_path, packed[:size]), BundleIncomplete), size
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.gate("G10")
def test_bytes_after_the_last_chunk(packed: bytes, tmp_path: Path) -> None:
    error = refused(tmp_path, packed + b"x")
    assert isinstance(error, ManifestInvalid) and "1 bytes after" in error.message


@pytest.mark.gate("G10")
def test_a_flipped_bit_anywhere(packed: bytes, tmp_path: Path) -> None:
    data_offset = boundaries(packed, tmp_path)[7]
    for at in [*range(data_offset), *range(data_offset, len(packed), 401)]:
        refused(tmp_path, packed[:at] + bytes([packed[at] ^ (1 << at % 8)]) + packed[at + 1 :])


def test_the_damaged_chunk_is_named_and_the_rest_kept(bundle: Path, packed: bytes, tmp_path: Path) -> None:
    damaged = packed[:-5] + bytes([packed[-5] ^ 1]) + packed[-4:]
    error = refused(tmp_path, damaged)
    assert isinstance(error, ChecksumMismatch)
    assert "of `tables.safetensors` (byte" in error.message
    assert error.hint
    assert unpack_bundle(write_archive(tmp_path, packed), tmp_path / "out") > 0
    assert content(tmp_path / "out") == content(bundle)


@pytest.mark.gate("G10")
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(100), b"moec", bytes(10_000)])
def test_other_files_are_no_archives(tmp_path: Path, data: bytes) -> None:
    error = refused(tmp_path, data)
    assert isinstance(error, BundleIncomplete if b"moecpack".startswith(data) else ManifestInvalid)


# Hostile archives: all digests are right, the contents are not


Stored = tuple[int, bytes, bytes]


def cut(files: Sequence[bytes], chunk_bytes: int = CHUNK) -> list[Stored]:
    """Files as stored chunks: (method, stored bytes, raw bytes)."""
    pieces = [data[at : at + chunk_bytes] for data in files for at in range(0, len(data), chunk_bytes)]
    return [(STORED, piece, piece) for piece in pieces]


def assemble(chunks: Sequence[Stored], manifest_bytes: int, chunk_bytes: int = CHUNK) -> bytes:
    digests = {id(raw): hashlib.sha256(raw).digest() for raw in {id(raw): raw for _, _, raw in chunks}.values()}
    index = [Chunk(len(stored), method, digests[id(raw)]) for method, stored, raw in chunks]
    return encode_index(chunk_bytes, manifest_bytes, index) + b"".join(stored for _, stored, _ in chunks)


def tiny() -> tuple[bytes, Files]:
    files, experts = files_and_experts()
    return encode_manifest(manifest_of(files, experts)), dict(sorted(files.items()))


def sealed(plain: dict[str, Any]) -> bytes:
    """A manifest with any content and the right digest."""
    plain.pop(DIGEST_FIELD, None)
    return canonical_json({**plain, DIGEST_FIELD: hashlib.sha256(canonical_json(plain)).hexdigest()})


def archive_of(manifest: bytes, files: Files) -> bytes:
    """Return an archive whose digests are right."""
    return assemble(cut([manifest, *(data for _, data in sorted(files.items()))]), len(manifest))


def test_a_hand_made_archive_unpacks(bundle: Path, tmp_path: Path) -> None:
    """The tests below change one thing in an archive that is otherwise good."""
    manifest, files = tiny()
    unpack_bundle(write_archive(tmp_path, archive_of(manifest, files)), tmp_path / "out")
    assert content(tmp_path / "out") == content(bundle)


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    "name",
    ["../escape", "/etc/passwd", "a/b", "..", ".hidden", "", "moec.json", "config.json", "a\\b", "a\0b", "x" * 300],
)
def test_names_that_leave_the_folder_or_occur_twice(tmp_path: Path, name: str) -> None:
    manifest, files = tiny()
    plain = json.loads(manifest)
    plain["files"][-1]["name"] = name
    manifest = sealed(plain)
    before = sorted(tmp_path.parent.iterdir())
    error = refused(tmp_path, archive_of(manifest, files))
    assert isinstance(error, ManifestInvalid)
    assert [path.name for path in tmp_path.iterdir()] == ["given.moecpack"]
    assert sorted(tmp_path.parent.iterdir()) == before


@pytest.mark.gate("G10")
@pytest.mark.parametrize("size", [0, 1 << 13, 1 << 45, 1 << 62, -1])
def test_declared_sizes_that_the_archive_does_not_hold(tmp_path: Path, size: int) -> None:
    manifest, files = tiny()
    plain = json.loads(manifest)
    plain["files"][0]["size_bytes"] = size
    manifest = sealed(plain)
    assert isinstance(refused(tmp_path, archive_of(manifest, files)), ManifestInvalid)


def header(version: int = 1, chunk_bytes: int = CHUNK, count: int = 1, manifest_bytes: int = 10) -> bytes:
    fields = b"moecpack" + version.to_bytes(4, "little") + chunk_bytes.to_bytes(4, "little")
    fields += count.to_bytes(8, "little") + manifest_bytes.to_bytes(8, "little")
    records = bytes(RECORD_BYTES * min(count, 4))
    return fields + hashlib.sha256(fields + records).digest() + records


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (header(version=2), UnknownFormatVersion),
        (header(chunk_bytes=0), ManifestInvalid),
        (header(chunk_bytes=CHUNK + 1), ManifestInvalid),
        (header(chunk_bytes=1 << 31), ManifestInvalid),
        (header(count=0), ManifestInvalid),
        (header(count=MAX_CHUNKS), BundleIncomplete),
        (header(count=MAX_CHUNKS + 1), ManifestInvalid),
        (header(count=(1 << 64) - 1), ManifestInvalid),
        (header(manifest_bytes=0), ManifestInvalid),
        (header(manifest_bytes=CHUNK + 1), ManifestInvalid),
        (header(manifest_bytes=(1 << 64) - 1), ManifestInvalid),
        (header() + b"behind", ManifestInvalid),
        (header(), ManifestInvalid),
    ],
)
def test_headers_out_of_range(tmp_path: Path, data: bytes, kind: type[BundleError]) -> None:
    assert type(refused(tmp_path, data)) is kind


def frame_without(what: str, raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(
        write_checksum=what != "checksum", write_content_size=what != "content size"
    ).compress(raw)


ZEROS = bytes(CHUNK)


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    ("method", "stored", "kind"),
    [
        (COMPRESSED, compress(bytes(1 << 30), 1), ManifestInvalid),
        (COMPRESSED, compress(bytes(1 << 22), 3), ChecksumMismatch),
        (COMPRESSED, compress(ZEROS[:-1], 3), ChecksumMismatch),
        (COMPRESSED, compress(b"\1" * CHUNK, 3), ChecksumMismatch),
        (COMPRESSED, compress(ZEROS, 3) + b"behind", ChecksumMismatch),
        (COMPRESSED, compress(ZEROS, 3)[:-1], ChecksumMismatch),
        (COMPRESSED, frame_without("checksum", ZEROS), ChecksumMismatch),
        (COMPRESSED, frame_without("content size", ZEROS), ChecksumMismatch),
        (COMPRESSED, b"not a frame", ChecksumMismatch),
        (COMPRESSED, b"", ManifestInvalid),
        (COMPRESSED, ZEROS, ManifestInvalid),
        (STORED, ZEROS[:-1], ManifestInvalid),
        (STORED, ZEROS + b"x", ManifestInvalid),
        (2, ZEROS, ManifestInvalid),
        (255, ZEROS, ManifestInvalid),
    ],
)
def test_chunks_that_are_not_what_they_declare(
    tmp_path: Path, method: int, stored: bytes, kind: type[BundleError]
) -> None:
    """One chunk of `config.json`, raw 4096 zeros, is replaced; its index record is right in every case."""
    files, experts = files_and_experts()
    files["config.json"] = ZEROS
    manifest = encode_manifest(manifest_of(files, experts))
    chunks = cut([manifest, *(data for _, data in sorted(files.items()))])
    at = chunks.index((STORED, ZEROS, ZEROS))
    unpack_bundle(write_archive(tmp_path, assemble(chunks, len(manifest))), tmp_path / "good")
    chunks[at] = (method, stored, ZEROS)
    assert type(refused(tmp_path, assemble(chunks, len(manifest)))) is kind


def test_padding_in_a_record_must_be_zero(tmp_path: Path) -> None:
    manifest, files = tiny()
    data = bytearray(archive_of(manifest, files))
    data[HEADER_BYTES + 5] = 1
    count = int.from_bytes(data[16:24], "little")
    records = bytes(data[HEADER_BYTES : HEADER_BYTES + count * RECORD_BYTES])
    data[32:HEADER_BYTES] = hashlib.sha256(bytes(data[:32]) + records).digest()
    assert isinstance(refused(tmp_path, bytes(data)), ManifestInvalid)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_chunk_too_few_or_too_many(tmp_path: Path, change: int) -> None:
    manifest, files = tiny()
    chunks = cut([manifest, *files.values()])
    chunks = chunks[:-1] if change < 0 else [*chunks, (STORED, b"x", b"x")]
    error = refused(tmp_path, assemble(chunks, len(manifest)))
    assert isinstance(error, ManifestInvalid) and "the index has" in error.message


def test_files_are_checked_against_the_manifest_too(tmp_path: Path) -> None:
    """Chunk digests come with the archive; the manifest's digest of the file has the last word."""
    manifest, files = tiny()
    files["config.json"] = files["config.json"].swapcase()
    error = refused(tmp_path, archive_of(manifest, files))
    assert isinstance(error, ChecksumMismatch) and "`config.json`" in error.message


def test_a_bundle_that_would_not_open_is_not_left_behind(tmp_path: Path) -> None:
    files, experts = files_and_experts()
    files[DENSE_NAME] = b"\xff" * len(files[DENSE_NAME])
    data = archive_of(encode_manifest(manifest_of(files, experts)), files)
    assert isinstance(refused(tmp_path, data), ManifestInvalid)
    assert not (tmp_path / "out.partial").exists()


def test_a_bundle_that_is_not_certified_is_not_unpacked(tmp_path: Path) -> None:
    files, experts = files_and_experts()
    data = archive_of(encode_manifest(replace(manifest_of(files, experts), certified=False)), files)
    assert "not certified" in refused(tmp_path, data).message
    assert not (tmp_path / "out.partial").exists()


UNPACK = """
import resource, sys, time
from pathlib import Path
from moec.manifests.errors import BundleError
from moec.runtime.bundle.archive import unpack_bundle
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    unpack_bundle(Path(sys.argv[1]), Path(sys.argv[2]))
except BundleError as error:
    print(error.exit_code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
"""


@pytest.mark.gate("G10")
@pytest.mark.parametrize("piece", [b"[],", b"x", b"1000,", b'"a":{},'])
def test_a_small_archive_with_a_large_manifest(tmp_path: Path, piece: bytes) -> None:
    """64 MiB of JSON in a few kB: refused with the memory of its bytes, not of what they would become."""
    raw = (piece * (MAX_MANIFEST_BYTES // len(piece) + 1))[:MAX_MANIFEST_BYTES]
    size = MAX_MANIFEST_BYTES // 4
    parts = [raw[at : at + size] for at in range(0, len(raw), size)]
    archive = write_archive(
        tmp_path, assemble([(COMPRESSED, compress(part, 3), part) for part in parts], len(raw), size)
    )
    assert archive.stat().st_size < 64 << 10
    done = subprocess.run(
        [sys.executable, "-c", UNPACK, str(archive), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        check=False,
    )
    exit_code, peak_mib = map(int, done.stdout.split())
    assert exit_code == 3 and peak_mib < 5 * MAX_MANIFEST_BYTES >> 20, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["given.moecpack"]


@pytest.mark.gate("G10")
def test_the_caller_bounds_what_an_archive_unpacks_to(tmp_path: Path) -> None:
    """The sizes that the manifest declares are compared before anything is written."""
    manifest, files = tiny()
    archive = write_archive(tmp_path, archive_of(manifest, files))
    total = len(manifest) + sum(map(len, files.values()))
    for most in (total - 1, len(manifest) - 1, 0):
        with pytest.raises(DoesNotFit, match=f"the limit is {most}") as caught:
            unpack_bundle(archive, tmp_path / "out", max_bytes=most)
        assert caught.value.exit_code == 1
        assert [path.name for path in tmp_path.iterdir()] == ["given.moecpack"]
    unpack_bundle(archive, tmp_path / "out", max_bytes=total)
    assert (tmp_path / "out").is_dir()


@pytest.mark.gate("G10")
def test_zeros_of_a_terabyte_do_not_fit_and_nothing_is_written(tmp_path: Path) -> None:
    """Every digest is right: an archive of a few MB that declares a file larger than the disk."""
    files, experts = files_and_experts()
    size, count = 64 << 20, 1 << 14
    zeros = bytes(size)
    plain = json.loads(encode_manifest(manifest_of(files, experts)))
    entry = next(entry for entry in plain["files"] if entry["name"] == "config.json")
    entry["size_bytes"] = size * count
    manifest = sealed(plain)
    large = [(COMPRESSED, compress(zeros, 3), zeros)] * count
    chunks = [
        part
        for name, data in [("", manifest), *sorted(files.items())]
        for part in (large if name == "config.json" else cut([data], size))
    ]
    archive = write_archive(tmp_path, assemble(chunks, len(manifest), size))
    with pytest.raises(DoesNotFit):
        unpack_bundle(archive, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["given.moecpack"]
