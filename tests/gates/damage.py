"""Functions that damage a bundle, and functions that make its digests match the damage: digests are no secret."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, TABLES_NAME
from moec.manifests.codec import DIGEST_FIELD, canonical_json
from moec.manifests.files.limits import MANIFEST_JSON
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.safetensors_header import build_header
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle

PROMPT = [5, 6, 200, 7, 90, 33, 8]
IO_MODES = ("direct", "buffered", "mmap")


def check(bundle: Path) -> None:
    """Do the checks of `moec verify`."""
    opened = open_bundle(bundle)
    opened.tables()
    verify_bundle(opened)


def run(bundle: Path, io: str = "auto", **options: Any) -> None:
    """Do the work of `moec run`: read every expert, take a prompt, and return tokens."""
    with load(bundle, **{"expert_cache": "100%", "context": 16, "threads": 1, "io": io, **options}) as engine:
        engine.encode("ab \U0001f600")
        assert len(list(engine.generate(PROMPT, max_new_tokens=2))) in (1, 2)


def flip(path: Path, place: int, mask: int = 1) -> None:
    """Change bits of one byte. A second call restores them."""
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ mask]))


def places(size: int, count: int = 6) -> list[int]:
    """Return the first index, the last one, and some between."""
    return sorted({0, size - 1, *(size * n // count for n in range(1, count))})


def plain_manifest(bundle: Path) -> dict[str, Any]:
    """Return the manifest as JSON values, without its digest."""
    plain: dict[str, Any] = load_strict_json((bundle / MANIFEST_NAME).read_bytes(), MANIFEST_JSON)
    del plain[DIGEST_FIELD]
    return plain


def seal(bundle: Path, plain: dict[str, Any]) -> None:
    """Write a manifest with its digest."""
    digest = hashlib.sha256(canonical_json(plain)).hexdigest()
    (bundle / MANIFEST_NAME).write_bytes(canonical_json({**plain, DIGEST_FIELD: digest}))


def seal_files(bundle: Path) -> None:
    """Write the sizes and digests of the present files into the manifest, experts included."""
    plain = plain_manifest(bundle)
    for entry in plain["files"]:
        data = (bundle / entry["name"]).read_bytes()
        entry["size_bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    for expert in plain["experts"]:
        data = (bundle / expert["file"]).read_bytes()
        part = data[expert["offset_bytes"] : expert["offset_bytes"] + expert["size_bytes"]]
        expert["xxh3"] = xxhash.xxh3_128_hexdigest(part)
    _seal_dense((bundle / DENSE_NAME).read_bytes(), plain["dense"])
    seal(bundle, plain)


def _seal_dense(data: bytes, entries: list[dict[str, Any]]) -> None:
    """Correct the checksums of the weights that the header names."""
    start = 8 + int.from_bytes(data[:8], "little")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(data[8:start])
        for entry in entries:
            begin, end = header[entry["name"]]["data_offsets"]
            entry["xxh3"] = xxhash.xxh3_128_hexdigest(data[start + begin : start + end])


def write_tables(bundle: Path, alignment_bytes: int = 4096, **changes: np.ndarray | None) -> None:
    """Write tables with some tensors replaced, and a manifest that agrees."""
    kinds = {"<u2": "U16", "<u4": "U32", "<i4": "I32", "<i8": "I64", "<f4": "F32", "|u1": "U8"}
    tensors: dict[str, np.ndarray | None] = {
        "popularity": np.ones((2, 3), np.uint32), "transitions": np.ones((1, 3, 3), np.uint32),
        "path.keys": np.zeros((0, 3), np.int32), "path.offsets": np.zeros(1, np.int64),
        "path.experts": np.zeros(0, np.uint16), "path.counts": np.zeros(0, np.uint32),
    }  # fmt: skip
    tensors.update({name.replace("path_", "path."): value for name, value in changes.items()})
    kept = {name: value for name, value in tensors.items() if value is not None}
    header = build_header(
        {name: (kinds[value.dtype.str], value.shape) for name, value in kept.items()}, alignment_bytes
    )
    (bundle / TABLES_NAME).write_bytes(header + b"".join(value.tobytes() for value in kept.values()))
    seal_files(bundle)
