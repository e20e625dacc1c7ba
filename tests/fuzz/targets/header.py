"""Headers of safetensors files: tensors that are accepted fill the file without holes or overlaps.

Each input is tried as the start of a file, and as the JSON of one that is as long as its offsets say.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from moec.manifests.files.limits import header_json
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.safetensors_header import HeaderError, build_header, read_header
from tests.fuzz.targets.scratch import file_of

_LONGEST_BYTES = 1 << 40  # the file is sparse


def fitting_file(data: bytes) -> Path | None:
    """A file with this JSON as its header, of the size that the offsets in it ask for."""
    try:
        plain: Any = load_strict_json(data, header_json())
        ends = [value["data_offsets"][1] for name, value in plain.items() if name != "__metadata__"]
        size = 8 + len(data) + max(ends, default=0)
        if type(size) is not int or not 0 < size < _LONGEST_BYTES:
            return None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    path = file_of("fitting.safetensors", struct.pack("<Q", len(data)) + data)
    os.truncate(path, size)
    return path


def target(data: bytes) -> None:
    paths = (file_of("raw.safetensors", data), fitting_file(data))
    for path in paths:
        if path is None:
            continue
        try:
            entries = list(read_header(path).values())
        except HeaderError:
            continue
        size = path.stat().st_size
        start = entries[0].offset_bytes if entries else size
        if start + sum(entry.size_bytes for entry in entries) != size:
            raise AssertionError("accepted tensors do not fill the file")


def seeds() -> list[bytes]:
    two = build_header({"a": ("F32", (2, 3)), "b": ("U8", (5,))}, 8)
    return [two[8:], build_header({}, 8)[8:], build_header({"none": ("BF16", (0, 4))}, 8)]
