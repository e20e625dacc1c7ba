"""Safetensors headers: read as untrusted input, written with padding so that data starts on a page."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from .files.limits import header_json
from .files.strict_json import load_strict_json, shown

MAX_RANK = 16
_PREFIX_BYTES = 8
DATA_ALIGNMENT_BYTES = 4096
"""Alignment of the data in a bundle's files."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class HeaderError(ValueError):
    """A file that is not a well-formed safetensors file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: dtype as the file names it, shape, and the position of its bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, in file order. Reads the header only.

    Raises HeaderError if the header is damaged, or if ranges overlap, leave gaps or exceed the file. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer does not block
    try:
        return header_of(descriptor)
    finally:
        os.close(descriptor)


def header_of(descriptor: int, tensors: int | None = None) -> dict[str, TensorEntry]:
    """Return the tensors of an opened safetensors file, as `read_header`.

    tensors: number of tensors that the file should hold, which bounds the header; None if unknown.
    The position of the descriptor does not move.
    """
    limits = header_json(tensors)
    file_bytes = os.fstat(descriptor).st_size  # 0: an empty file, or not a regular file
    prefix = os.pread(descriptor, _PREFIX_BYTES, 0) if file_bytes else b""
    if len(prefix) < _PREFIX_BYTES:
        raise HeaderError(f"{file_bytes} bytes are too few for a header")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > file_bytes - _PREFIX_BYTES:
        raise HeaderError(f"header of {header_bytes} bytes does not fit into the file of {file_bytes}")
    if header_bytes > limits.size_bytes:
        raise HeaderError(f"header of {header_bytes} bytes, more than the limit of {limits.size_bytes}")
    raw = os.pread(descriptor, header_bytes, _PREFIX_BYTES)
    try:
        plain = load_strict_json(raw, limits)
    except ValueError as error:
        raise HeaderError(f"header is not strict JSON: {error}") from error
    if not isinstance(plain, dict):
        raise HeaderError("header is not an object")
    plain.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + header_bytes) for name, value in plain.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].offset_bytes, item[1].size_bytes))
    end = 8 + header_bytes
    for name, entry in ordered:
        if entry.offset_bytes != end:
            raise HeaderError(f"tensor `{name[:80]}` starts at {entry.offset_bytes}, expected {end}")
        end += entry.size_bytes
    if end != file_bytes:
        raise HeaderError(f"tensors end at byte {end}, the file has {file_bytes}")
    return dict(ordered)


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"tensor `{name[:80]}` has other fields than dtype, shape, data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderError(f"tensor `{name[:80]}` has unknown dtype {shown(dtype)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
            raise HeaderError(f"tensor `{name[:80]}` has a shape or offsets out of range")
    if len(shape) > MAX_RANK:
        raise HeaderError(f"tensor `{name[:80]}` has {len(shape)} dimensions, more than {MAX_RANK}")
    size = ITEM_BYTES[dtype]
    for extent in shape:
        size *= extent
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise HeaderError(f"tensor `{name[:80]}`: shape and dtype take {size} bytes, data_offsets say otherwise")
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], size)


def build_header(tensors: dict[str, tuple[str, tuple[int, ...]]], alignment_bytes: int = DATA_ALIGNMENT_BYTES) -> bytes:
    """Return length prefix and JSON of a file with these tensors (name -> dtype, shape) in order, without gaps.

    The JSON is padded with spaces, so that the data starts at a multiple of alignment_bytes.
    """
    plain, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        plain[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(plain, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment_bytes)
    return struct.pack("<Q", len(text)) + text
