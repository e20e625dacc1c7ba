"""Pack a bundle folder into one file. Equal bundles give equal archives with equal versions of zstandard."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

import zstandard

from moec.manifests.bundle import MANIFEST_NAME, PARTIAL_SUFFIX
from moec.manifests.errors import BundleError, BundleIncomplete, ChecksumMismatch, MoecError, OptionError
from moec.manifests.files.limits import MAX_CHUNKS, MAX_MANIFEST_BYTES
from moec.manifests.files.output_file import put_in_place, require_free_bytes
from moec.manifests.progress import Progress
from moec.runtime.bundle.files import BundleFile
from moec.runtime.bundle.open_bundle import open_bundle

from .layout import (
    CHUNK_BYTES,
    COMPRESSED,
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES,
    STORED,
    UNFINISHED_MAGIC,
    Chunk,
    Index,
    Member,
    Place,
    decode_chunk,
    encode_index,
    encode_record,
    encode_unfinished,
    file_errors,
    members_of,
)

# A sample has a few pieces spread over a member. For packed codes the first piece shows that they do not shrink.
SAMPLE_PIECES = 4
SAMPLE_PIECE_BYTES = 256 << 10
STORE_LEVEL = 0
LEVELS = (3, 9, 19)
# Least saving for compression. Below it, reading the raw bytes is faster than decompressing.
LEAST_SAVING = 0.02
# Least saving of a stronger level over a weaker one, as a share of the raw bytes. On bf16 weights level 3 packs
# 320 MB/s, level 9 packs 26 MB/s and level 19 packs 2 MB/s. There level 19 saves 1.2 % more than level 3, which is not
# enough. On packed codes of 4 bits it saves 6 %.
LEAST_GAIN = 0.02
# Largest bundle for the strongest level: about two minutes at 2 MB/s.
MAX_STRONGEST_BYTES = 256 << 20


def pack_bundle(
    bundle: Path,
    archive: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> int:
    """Write a bundle into one file. The digest of every file is checked on the way.

    The archive grows in `ARCHIVE.partial` and gets its name when it is complete and synced.
    After a killed run the next run keeps the complete chunks in it. After an error nothing is left.
    progress: called with (raw bytes done, raw bytes in all).
    overwrite: whether an existing archive may be replaced.
    Returns the raw bytes of chunks that an interrupted run had already written.
    Raises BundleError for a bundle that does not open or has changed. Raises OptionError, DoesNotFit, InputError.
    """
    bundle, archive = Path(bundle), Path(archive)
    with file_errors(archive), open_bundle(bundle) as opened:
        raw_manifest = opened.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        members = members_of(opened.manifest, len(raw_manifest))
        if archive.is_dir() or (os.path.lexists(archive) and not overwrite):
            raise OptionError(f"`{archive}` exists", "choose another file or remove it")
        if archive.parent.resolve() == bundle.resolve():
            raise OptionError(f"`{archive}` lies inside the bundle", "choose a file outside it")
        count = sum(member.chunk_count(chunk_bytes) for member in members)
        if count > MAX_CHUNKS:
            raise OptionError(f"`{bundle}` takes {count} chunks, an archive holds {MAX_CHUNKS}", "use larger chunks")
        total = sum(member.size_bytes for member in members)
        unfinished = encode_unfinished(chunk_bytes, raw_manifest, count)
        partial = archive.with_name(archive.name + PARTIAL_SUFFIX)
        # Open the unfinished archive, new or left by a killed run.
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not is_file or os.pread(descriptor, len(MAGIC), 0) not in (b"", MAGIC, UNFINISHED_MAGIC):
            os.close(descriptor)
            raise OptionError(f"`{partial}` is in the way and no unfinished archive", "remove it or name another file")
        file = os.fdopen(descriptor, "r+b")
        try:
            with file:
                there = os.fstat(file.fileno()).st_size
                require_free_bytes(archive.parent, max(0, HEADER_BYTES + count * RECORD_BYTES + total - there))
                packer = _Packer(file, unfinished, count, total, progress)
                for member in members:
                    packer.add(opened.files[member.name], member, chunk_bytes)
                packer.finish(encode_index(chunk_bytes, len(raw_manifest), packer.chunks))
            put_in_place(partial, archive)
        except (MoecError, OSError):
            partial.unlink(missing_ok=True)
            raise
    return packer.kept_bytes


class _Packer:
    """Appends chunks after an index that grows with them. Complete chunks of a killed run are kept."""

    def __init__(self, file: BinaryIO, unfinished: bytes, count: int, total_bytes: int, progress: Progress | None):
        self._file = file
        self._done, self._total, self._progress = 0, total_bytes, progress
        self._offset = HEADER_BYTES + count * RECORD_BYTES
        self.chunks: list[Chunk] = []
        self.kept_bytes = 0
        file.seek(0)
        front = file.read(self._offset)
        is_known = front[:HEADER_BYTES] == unfinished and len(front) == self._offset
        self._known = Index(0, 0, front[HEADER_BYTES:] if is_known else b"").chunks()
        if not is_known:
            file.seek(0)
            file.truncate()
            file.write(unfinished + bytes(count * RECORD_BYTES))

    def add(self, file: BundleFile, member: Member, chunk_bytes: int) -> None:
        """Append one opened file. Raises ChecksumMismatch, BundleIncomplete if it differs from the manifest."""
        digest, path = hashlib.sha256(), file.path
        with open(file.descriptor, "rb", closefd=False) as source:
            source.seek(0)
            level = choose_level(sample(source, member.size_bytes), self._total)
            source.seek(0)
            for number, raw_bytes in enumerate(member.raw_sizes(chunk_bytes)):
                raw = source.read(raw_bytes)
                if len(raw) != raw_bytes:
                    raise BundleIncomplete(f"`{path}` became shorter while it was packed", "pack it again")
                digest.update(raw)
                if not self._keep(member.name, number, raw):
                    self._append(raw, level)
                self._done += raw_bytes
                if self._progress is not None:
                    self._progress(self._done, self._total)
        if member.sha256 not in (None, digest.hexdigest()):
            raise ChecksumMismatch(f"`{path}` differs from the digest in `{MANIFEST_NAME}`", "copy the bundle again")

    def _keep(self, member: str, number: int, raw: bytes) -> bool:
        """Keep the next chunk if it is already in the file, and return whether it is.

        The first mismatch ends the search.
        """
        try:
            chunk = next(self._known)
            place = Place(member, number, self._offset, len(raw), chunk)
            self._file.seek(self._offset)
            if not place.is_possible or decode_chunk(self._file.read(chunk.stored_bytes), place) != raw:
                raise StopIteration
        except (StopIteration, BundleError):
            self._known = iter(())
            return False
        self.chunks.append(chunk)
        self._offset += chunk.stored_bytes
        self.kept_bytes += len(raw)
        return True

    def _append(self, raw: bytes, level: int) -> None:
        """Write a chunk, then its record. The digest detects a record without its chunk."""
        data, method = raw, STORED
        if level != STORE_LEVEL:
            frame = compress(raw, level)
            if len(frame) < len(raw):
                data, method = frame, COMPRESSED
        chunk = Chunk(len(data), method, hashlib.sha256(raw).digest())
        self._file.seek(self._offset)
        self._file.write(data)
        self._file.seek(HEADER_BYTES + len(self.chunks) * RECORD_BYTES)
        self._file.write(encode_record(chunk))
        self.chunks.append(chunk)
        self._offset += len(data)

    def finish(self, index: bytes) -> None:
        """Cut the file after the last chunk, write header and index at its start, and sync it."""
        self._file.truncate(self._offset)
        self._file.seek(0)
        self._file.write(index)
        self._file.flush()
        os.fsync(self._file.fileno())


def compress(raw: bytes, level: int) -> bytes:
    """Compress to one zstandard frame with content size and checksum."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(raw)


def sample(source: BinaryIO, size_bytes: int) -> bytes:
    """Read up to SAMPLE_PIECES pieces spread evenly over a file, or all of a small file."""
    if size_bytes <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        return source.read(size_bytes)
    pieces = []
    for number in range(SAMPLE_PIECES):
        source.seek((size_bytes - SAMPLE_PIECE_BYTES) * number // (SAMPLE_PIECES - 1))
        pieces.append(source.read(SAMPLE_PIECE_BYTES))
    return b"".join(pieces)


def choose_level(data: bytes, bundle_bytes: int) -> int:
    """Choose the level for a member.

    Level 3 must save LEAST_SAVING, else the member is stored. Each stronger level must save another LEAST_GAIN of the
    raw bytes over the level chosen so far. The strongest is tried only in bundles up to MAX_STRONGEST_BYTES.
    data: a sample of the member.
    """
    weakest, *stronger = LEVELS
    best_bytes = len(compress(data, weakest))
    if best_bytes > (1 - LEAST_SAVING) * len(data):
        return STORE_LEVEL
    level = weakest
    for candidate in stronger:
        if candidate == LEVELS[-1] and bundle_bytes > MAX_STRONGEST_BYTES:
            break
        size = len(compress(data, candidate))
        if best_bytes - size >= LEAST_GAIN * len(data):
            level, best_bytes = candidate, size
    return level
