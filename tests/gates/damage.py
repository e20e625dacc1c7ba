"""Functions that damage a bundle, and functions that make its digests match the damage: digests are no secret."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, TABLES_NAME
from moec.manifests.codec import DIGEST_FIELD, canonical_json
from moec.manifests.files.limits import MANIFEST_JSON
from moec.manifests.files.strict_json import load_strict_json
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from tests.hostile.bundle_writer import tables_file

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


def sealed(plain: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with the digest of its fields."""
    fields = {name: value for name, value in plain.items() if name != DIGEST_FIELD}
    return canonical_json({**fields, DIGEST_FIELD: hashlib.sha256(canonical_json(fields)).hexdigest()})


def seal(bundle: Path, plain: dict[str, Any]) -> None:
    """Write a manifest with its digest."""
    (bundle / MANIFEST_NAME).write_bytes(sealed(plain))


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of `moec.json`, and correct its digest."""
    plain = json.loads((bundle / MANIFEST_NAME).read_bytes())
    edit(plain)
    seal(bundle, plain)


def seal_files(bundle: Path) -> None:
    """Write sizes, digests and checksums of the present files into the manifest.

    Regular files that it does not list are added. Other files keep their entries. A manifest that is no regular file or
    no JSON object does not change.
    """
    if not stat.S_ISREG(os.lstat(bundle / MANIFEST_NAME).st_mode):
        return
    try:
        plain = json.loads((bundle / MANIFEST_NAME).read_bytes())
        listed = {entry["name"]: entry for entry in plain["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    for path in sorted(bundle.iterdir()):
        if path.name != MANIFEST_NAME and stat.S_ISREG(os.lstat(path).st_mode):
            data = path.read_bytes()
            entry = listed.setdefault(path.name, {"name": path.name})
            entry.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for expert in (*plain["experts"], *plain.get("low_experts", ())):
                if expert["file"] == path.name:
                    start = expert["offset_bytes"]
                    expert["xxh3"] = xxhash.xxh3_128_hexdigest(data[start : start + expert["size_bytes"]])
            if path.name == DENSE_NAME:
                _seal_dense(data, plain["dense"])
    plain["files"] = [listed[name] for name in sorted(listed)]
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
    tensors: dict[str, np.ndarray | None] = {
        "popularity": np.ones((2, 3), np.uint32), "transitions": np.ones((1, 3, 3), np.uint32),
        "path.keys": np.zeros((0, 3), np.int32), "path.offsets": np.zeros(1, np.int64),
        "path.experts": np.zeros(0, np.uint16), "path.counts": np.zeros(0, np.uint32),
    }  # fmt: skip
    tensors.update({name.replace("path_", "path."): value for name, value in changes.items()})
    present = {name: value for name, value in tensors.items() if value is not None}
    (bundle / TABLES_NAME).write_bytes(tables_file(present, alignment_bytes))
    seal_files(bundle)
