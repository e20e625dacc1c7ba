"""Open a bundle: manifest, file list and headers checked before anything is read from them."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from moec.manifests.bundle import (
    DENSE_NAME,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    TABLES_NAME,
    BundleManifest,
    FileEntry,
)
from moec.manifests.codec import MAX_MANIFEST_BYTES, decode_manifest
from moec.manifests.errors import BundleIncomplete, ChecksumMismatch, ManifestInvalid
from moec.manifests.safetensors_header import HeaderError, TensorEntry, read_header

CHUNK_BYTES = 4 << 20
_COMPILE_AGAIN = "compile the bundle again"
_DTYPES = {"U16": np.uint16, "U32": np.uint32, "I32": np.int32, "I64": np.int64}


def expert_tensor_name(expert: int) -> str:
    """Name of one expert's tensor in its layer's file. Source: docs/format.md, Expert files."""
    return f"experts.{expert:05d}"


@dataclass(frozen=True, slots=True)
class Tables:
    """What calibration counted. popularity uint32 [L, E]; transitions uint32 [L-1, E, E];
    path_keys int32 [N, 3] rows (layer, expert two layers back, expert one layer back), sorted;
    path_offsets int64 [N+1] into path_experts uint16 and path_counts uint32.
    """

    popularity: np.ndarray
    transitions: np.ndarray
    path_keys: np.ndarray
    path_offsets: np.ndarray
    path_experts: np.ndarray
    path_counts: np.ndarray


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: checked manifest and checked headers. No weight has been read."""

    path: Path
    manifest: BundleManifest
    headers: dict[str, dict[str, TensorEntry]]

    def read_tensor_bytes(self, file: str, entry: TensorEntry) -> np.ndarray:
        """Raw bytes of one tensor, uint8 [size]."""
        data = np.empty(entry.size_bytes, np.uint8)
        self.read_into(file, entry.offset_bytes, data)
        return data

    def read_into(self, file: str, offset_bytes: int, data: np.ndarray) -> None:
        """Fill uint8 [size] with the bytes of a file from an offset on. Raises BundleIncomplete if the file ends early.

        Whole pages are read past the page cache where memory, offset and file system allow it: 406 MB of dense weights
        take 0.15 s instead of 0.74.
        """
        done = _read_direct(self.path / file, offset_bytes, data)
        with (self.path / file).open("rb", buffering=0) as source:
            source.seek(offset_bytes + done)
            # One read of the system ends at 2 GiB.
            while done < len(data):
                count = source.readinto(data.data[done:])
                if not count:
                    raise BundleIncomplete(f"`{self.path / file}` ended while reading at byte {source.tell()}")
                done += count

    def tables(self) -> Tables:
        """The calibration tables. Raises ManifestInvalid if shapes or indices contradict the model."""
        return _read_tables(self)


def _read_direct(path: Path, offset_bytes: int, data: np.ndarray) -> int:
    """Read the whole pages of a range with direct reads; how many bytes that were, 0 where it is not possible."""
    flag, page = getattr(os, "O_DIRECT", 0), mmap.PAGESIZE
    whole, done = len(data) // page * page, 0
    if not flag or not whole or offset_bytes % page or data.__array_interface__["data"][0] % page:
        return 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
        try:
            while done < whole:
                count = os.preadv(descriptor, [data.data[done:whole]], offset_bytes + done)
                if count == 0 or count % page:
                    break
                done += count
        finally:
            os.close(descriptor)
    except OSError:  # the file system refuses, or the disk: what is missing is read again, which says what is wrong
        pass
    return done


def open_bundle(path: Path, *, allow_partial: bool = False) -> Bundle:
    """Check manifest, file list, sizes and headers. Digests of contents are checked by `verify_bundle`.

    Raises BundleError; a folder that is still being built is refused unless allow_partial.
    """
    if os.path.realpath(path).endswith(PARTIAL_SUFFIX) and not allow_partial:
        raise BundleIncomplete(f"`{path}` is an unfinished compile", "run the compile again with `--resume`")
    manifest_path = path / MANIFEST_NAME
    if not manifest_path.is_file():
        raise BundleIncomplete(f"`{path}` has no `{MANIFEST_NAME}`, so it is not a complete bundle", "compile it again")
    if manifest_path.is_symlink():
        raise BundleIncomplete(f"`{manifest_path}` is a link", "copy the bundle again, files instead of links")
    with manifest_path.open("rb") as file:
        manifest = decode_manifest(file.read(MAX_MANIFEST_BYTES + 1), str(manifest_path))
    if not manifest.certified and not allow_partial:
        raise BundleIncomplete(f"`{manifest_path}` is not certified", "run the compile again with `--resume`")
    _check_file_list(path, manifest)
    headers = {}
    for name in sorted({DENSE_NAME, TABLES_NAME, *(entry.file for entry in manifest.stored_experts)}):
        try:
            headers[name] = read_header(path / name)
        except HeaderError as error:
            raise ManifestInvalid(f"`{path / name}`: {error}", "copy the bundle again") from error
    bundle = Bundle(path, manifest, headers)
    _check_headers(bundle)
    return bundle


def _check_file_list(path: Path, manifest: BundleManifest) -> None:
    listed = {entry.name: entry for entry in manifest.files}
    for required in (DENSE_NAME, TABLES_NAME, *(entry.file for entry in manifest.stored_experts)):
        if required not in listed:
            raise ManifestInvalid(f"`{path / MANIFEST_NAME}` does not list `{required}`", "compile the bundle again")
    for entry in manifest.files:
        file = path / entry.name
        if file.is_symlink():
            raise BundleIncomplete(f"`{file}` is a link", "copy the bundle again, files instead of links")
        if not file.is_file():
            raise BundleIncomplete(f"`{file}` is missing", "copy the bundle again")
        size = file.stat().st_size
        if size != entry.size_bytes:
            raise BundleIncomplete(f"`{file}` has {size} bytes, expected {entry.size_bytes}", "copy the bundle again")
    extra = sorted(item.name for item in path.iterdir() if item.name not in listed and item.name != MANIFEST_NAME)
    if extra:
        raise BundleIncomplete(f"`{path}` holds `{extra[0]}`, which the manifest does not list", "remove the file")


def _check_headers(bundle: Bundle) -> None:
    for expert in bundle.manifest.stored_experts:
        tensor = bundle.headers[expert.file].get(expert_tensor_name(expert.expert))
        place = f"`{bundle.path / expert.file}`, expert {expert.expert}"
        if tensor is None or tensor.dtype != "U8":
            raise ManifestInvalid(f"{place}: no uint8 tensor in the header", "compile the bundle again")
        if (tensor.offset_bytes, tensor.size_bytes) != (expert.offset_bytes, expert.size_bytes):
            raise ManifestInvalid(f"{place}: the header and the manifest disagree", "compile the bundle again")
    dense, place = bundle.headers[DENSE_NAME], f"`{bundle.path / DENSE_NAME}`"
    if set(dense) != {entry.name for entry in bundle.manifest.dense}:
        raise ManifestInvalid(f"{place} holds other tensors than the manifest lists", _COMPILE_AGAIN)
    for entry in bundle.manifest.dense:
        tensor = dense[entry.name]
        if len(entry.shape) == 1:
            expected = ("BF16" if entry.spec.float_type == "bfloat16" else "F16", 2 * entry.shape[0])
        else:
            expected = ("U8", entry.spec.packed_bytes(*entry.shape))
        if (tensor.dtype, tensor.size_bytes) != expected:
            raise ManifestInvalid(
                f"{place}, tensor `{entry.name}`: expected {expected}, found {tensor.dtype, tensor.size_bytes}",
                _COMPILE_AGAIN,
            )


def _read_tables(bundle: Bundle) -> Tables:
    header = bundle.headers[TABLES_NAME]

    layers = bundle.manifest.model.layers
    experts = max(layer.experts.count for layer in layers)
    place = f"`{bundle.path / TABLES_NAME}`"

    def read(name: str, dtype: str, *shape: int | None) -> np.ndarray:
        """Type and shape are checked before anything is read; None stands for any extent."""
        entry = header.get(name)
        fits = entry is not None and entry.dtype == dtype and len(entry.shape) == len(shape)
        if entry is None or not fits or any(w not in (None, n) for w, n in zip(shape, entry.shape, strict=True)):
            raise ManifestInvalid(f"{place}: no tensor `{name}` of type and shape {dtype} {shape}", _COMPILE_AGAIN)
        return bundle.read_tensor_bytes(TABLES_NAME, entry).view(_DTYPES[dtype]).reshape(entry.shape)

    tables = Tables(
        read("popularity", "U32", len(layers), experts),
        read("transitions", "U32", len(layers) - 1, experts, experts),
        read("path.keys", "I32", None, 3),
        read("path.offsets", "I64", None),
        read("path.experts", "U16", None),
        read("path.counts", "U32", None),
    )
    offsets = tables.path_offsets
    consistent = (
        len(offsets) == len(tables.path_keys) + 1
        and offsets[0] == 0
        and bool(np.all(offsets[1:] >= offsets[:-1]))
        and offsets[-1] == len(tables.path_experts) == len(tables.path_counts)
        and (len(tables.path_experts) == 0 or int(tables.path_experts.max()) < experts)
    )
    if not consistent:
        raise ManifestInvalid(f"{place}: the path dictionary contradicts itself or the model", _COMPILE_AGAIN)
    return tables


def file_digest(path: Path, progress: Callable[[int], None]) -> str:
    """SHA-256 of a file; progress is called with the bytes done so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(done)
    return digest.hexdigest()


def verify_bundle(bundle: Bundle, progress: Callable[[int, int], None] | None = None) -> None:
    """Check the SHA-256 of every file and the checksum of every weight. Raises ChecksumMismatch with the place.

    progress: called with (bytes done, bytes in all).
    """
    total, before = sum(entry.size_bytes for entry in bundle.manifest.files), 0

    def report(done: int) -> None:
        if progress is not None:
            progress(before + done, total)

    for entry in bundle.manifest.files:
        if file_digest(bundle.path / entry.name, report) != entry.sha256:
            raise ChecksumMismatch(f"{_damaged_place(bundle, entry)} differs from its digest", "copy the bundle again")
        before += entry.size_bytes
    for expert in bundle.manifest.stored_experts:
        if _checksum(bundle, expert.file, expert.offset_bytes, expert.size_bytes) != expert.xxh3:
            raise ChecksumMismatch(
                f"`{bundle.path / expert.file}`, expert {expert.expert}: differs from its checksum", "compile it again"
            )
    header = bundle.headers[DENSE_NAME]
    for weight in bundle.manifest.dense:
        tensor = header[weight.name]
        if _checksum(bundle, DENSE_NAME, tensor.offset_bytes, tensor.size_bytes) != weight.xxh3:
            raise ChecksumMismatch(
                f"`{bundle.path / DENSE_NAME}`, `{weight.name}`: differs from its checksum", "compile it again"
            )


def verify_files(bundle: Bundle, names: Sequence[str]) -> None:
    """Check the SHA-256 of these files, as far as the manifest lists them. Raises ChecksumMismatch."""
    for entry in bundle.manifest.files:
        if entry.name in names and file_digest(bundle.path / entry.name, lambda done: None) != entry.sha256:
            raise ChecksumMismatch(f"`{bundle.path / entry.name}` differs from its digest", "copy the bundle again")


def _checksum(bundle: Bundle, file: str, offset_bytes: int, size_bytes: int) -> str:
    """XXH3 of a part of a file."""
    with (bundle.path / file).open("rb") as source:
        source.seek(offset_bytes)
        return xxhash.xxh3_128_hexdigest(source.read(size_bytes))


def _damaged_place(bundle: Bundle, entry: FileEntry) -> str:
    """The expert that is damaged, if the file holds experts; otherwise the file."""
    for expert in bundle.manifest.stored_experts:
        if (
            expert.file == entry.name
            and _checksum(bundle, expert.file, expert.offset_bytes, expert.size_bytes) != expert.xxh3
        ):
            return f"`{bundle.path / entry.name}`, expert {expert.expert} of layer {expert.layer},"
    return f"`{bundle.path / entry.name}`"
