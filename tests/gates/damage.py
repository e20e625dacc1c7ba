"""Ways to damage a bundle, and to make the damage look intended: digests are no secret."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME
from moec.manifests.codec import DIGEST_FIELD, canonical_json, load_strict_json
from moec.runtime import load
from moec.runtime.bundle import open_bundle, verify_bundle

PROMPT = [5, 6, 200, 7, 90, 33, 8]
IO_MODES = ("direct", "buffered", "mmap")


def check(bundle: Path) -> None:
    """What `moec verify` does."""
    opened = open_bundle(bundle)
    opened.tables()
    verify_bundle(opened)


def run(bundle: Path, io: str = "auto", **options: Any) -> None:
    """What `moec run` does: every expert is read, a text goes in, tokens come out."""
    with load(bundle, **{"expert_cache": "100%", "context": 16, "threads": 1, "io": io, **options}) as engine:
        engine.encode("ab \U0001f600")
        assert len(list(engine.generate(PROMPT, max_new_tokens=2))) in (1, 2)


def flip(path: Path, place: int, mask: int = 1) -> None:
    """Change bits of one byte; a second time: change them back."""
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ mask]))


def places(size: int, count: int = 6) -> list[int]:
    """First, last, and some between."""
    return sorted({0, size - 1, *(size * n // count for n in range(1, count))})


def plain_manifest(bundle: Path) -> dict[str, Any]:
    """The manifest as JSON values, without its digest."""
    plain: dict[str, Any] = load_strict_json((bundle / MANIFEST_NAME).read_bytes())
    del plain[DIGEST_FIELD]
    return plain


def seal(bundle: Path, plain: dict[str, Any]) -> None:
    """Write a manifest with the digest that it then has."""
    digest = hashlib.sha256(canonical_json(plain)).hexdigest()
    (bundle / MANIFEST_NAME).write_bytes(canonical_json({**plain, DIGEST_FIELD: digest}))


def seal_files(bundle: Path) -> None:
    """Make the manifest say what the files now are, digests of experts included."""
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
    """The checksums of the weights that the header still names."""
    start = 8 + int.from_bytes(data[:8], "little")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(data[8:start])
        for entry in entries:
            begin, end = header[entry["name"]]["data_offsets"]
            entry["xxh3"] = xxhash.xxh3_128_hexdigest(data[start + begin : start + end])
