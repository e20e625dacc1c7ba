"""Seeds: small hostile inputs that once showed a defect, each with its command line and the required end.

`tests/gates/test_g10_seeds.py` replays all of them through the command line. Every defect by hostile input adds a
seed to `SEEDS` of a module `tests/hostile/seeds_*.py`. The gate finds these modules by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME
from moec.manifests.codec import DIGEST_FIELD, canonical_json


@dataclass(frozen=True)
class Seed:
    """One hostile input.

    name: the fault in it.
    arguments: arguments of `moec`. `{bundle}` is the folder of the changed bundle, `{work}` an empty folder next to it.
    exit_codes: allowed exit codes, of 0, 1, 2, 3 and 130.
    change: changes a new tiny bundle. It may put other files next to the folder.
    standard_input: bytes of standard input.
    seal: whether the digests are corrected after the change.
    """

    name: str
    arguments: tuple[str, ...]
    exit_codes: frozenset[int]
    change: Callable[[Path], None] | None = None
    standard_input: bytes = b""
    seal: bool = True


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the fields of `moec.json`, and correct its digest."""
    path = bundle / MANIFEST_NAME
    plain = json.loads(path.read_bytes())
    edit(plain)
    path.write_bytes(sealed(plain))


def sealed(plain: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with the digest of its fields."""
    own = {name: value for name, value in plain.items() if name != DIGEST_FIELD}
    return canonical_json({**own, DIGEST_FIELD: hashlib.sha256(canonical_json(own)).hexdigest()})


def seal_bundle(bundle: Path) -> None:
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
            _seal_experts(plain, path.name, data)
            if path.name == DENSE_NAME:
                _seal_dense(plain["dense"], data)
    plain["files"] = [listed[name] for name in sorted(listed)]
    (bundle / MANIFEST_NAME).write_bytes(sealed(plain))


def _seal_experts(plain: dict[str, Any], file: str, data: bytes) -> None:
    for entry in (*plain["experts"], *plain.get("low_experts", ())):
        if entry["file"] == file:
            start = entry["offset_bytes"]
            entry["xxh3"] = xxhash.xxh3_128_hexdigest(data[start : start + entry["size_bytes"]])


def _seal_dense(entries: list[dict[str, Any]], data: bytes) -> None:
    """Correct the checksums of the weights that the header names."""
    start = 8 + int.from_bytes(data[:8], "little")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(data[8:start])
        for entry in entries:
            begin, end = header[entry["name"]]["data_offsets"]
            entry["xxh3"] = xxhash.xxh3_128_hexdigest(data[start + begin : start + end])
