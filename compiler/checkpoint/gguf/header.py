"""The head of a GGUF file: metadata, and the place of each tensor. No weight is read, and nothing is trusted.

Source: the specification of GGUF, versions 2 and 3 (ggml, docs/gguf.md). Numbers are little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moec.manifests.errors import CheckpointError
from moec.manifests.files.input_file import UnreadableFile, open_input

from ..url import is_url

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEAD_BYTES = 256 << 20  # the largest vocabulary of today takes 16 MiB
_MAX_NAME_BYTES = 1 << 10
_MAX_TENSORS, _MAX_KEYS = 1 << 16, 1 << 14
_MAX_DIMENSIONS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""numpy types of the numbers that metadata may hold."""
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_REMEDY = "copy the file again and compare its size with the source"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor.

    shape: rows first, as other formats have it.
    kind: name of its type, like `Q4_0`.
    """

    file: Path
    shape: tuple[int, ...]
    kind: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHead:
    """Metadata of the first file, and the tensors of all files of a set."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


class _Reader:
    """Reads the head in order. Counts are compared with the bytes that are left, before anything is allocated."""

    def __init__(self, file: BinaryIO, path: Path, size_bytes: int) -> None:
        self._file, self.path, self._left = file, path, min(size_bytes, _MAX_HEAD_BYTES)
        self.at = 0

    def fail(self, found: str) -> CheckpointError:
        return CheckpointError(f"`{self.path}` is no whole GGUF file: {found}", _REMEDY)

    def bytes(self, count: int) -> bytes:
        if not 0 <= count <= self._left:
            raise self.fail(f"{count} bytes are said to follow byte {self.at}, {self._left} may")
        data = self._file.read(count)
        if len(data) != count:
            raise self.fail(f"it ends at byte {self.at + len(data)}")
        self._left -= count
        self.at += count
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self.bytes(struct.calcsize(form)))[0])

    def text(self, most: int = _MAX_HEAD_BYTES) -> str:
        count = self.number("Q")
        if count > most:
            raise self.fail(f"a name of {count} bytes at byte {self.at}")
        try:
            return self.bytes(count).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"a text before byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self._numbers(kind, 1)[0].item()

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            if count * 8 > self._left:
                raise self.fail(f"an array of {count} texts at byte {self.at}")
            return [self.text() for _ in range(count)]
        return self._numbers(kind, count).tolist()

    def _numbers(self, kind: int, count: int) -> Any:
        if kind not in _SCALARS:
            raise self.fail(f"a value of the unknown type {kind} at byte {self.at}")
        numbers = np.frombuffer(
            self.bytes(count * np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind].replace("?", "u1")
        )
        return numbers.astype(bool) if kind == _BOOL else numbers


def is_gguf(path: str) -> bool:
    """Return whether a path names a GGUF file that exists."""
    return path.endswith(SUFFIX) and not is_url(path) and Path(path).expanduser().is_file()


def read_head(path: Path) -> GgufHead:
    """Read the heads of a file, and of the other files of its set. Raises CheckpointError."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        metadata, tensors = _read_one(path)
        if (count := metadata.get("split.count", 0)) not in (0, 1):
            raise CheckpointError(
                f"`{path}` is one of {count} files, expected a name like `NAME-00001-of-{count:05}.gguf`",
                "give the files the names that they were published with",
            )
        return GgufHead(path, metadata, tensors)
    count = int(match["count"])
    first = path.with_name(f"{match['stem']}-{1:05}-of-{count:05}.gguf")
    metadata, tensors = dict[str, Any](), dict[str, StoredTensor]()
    for number in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise CheckpointError(f"`{path}` is one of {count} files, and `{part.name}` is missing", "copy it too")
        found, of_part = _read_one(part)
        if (found.get("split.no", number - 1), found.get("split.count", count)) != (number - 1, count):
            raise CheckpointError(
                f"`{part}` says that it is file {found.get('split.no', 0) + 1} of {found.get('split.count')}",
                "give the files the names that they were published with",
            )
        if twice := tensors.keys() & of_part.keys():
            raise CheckpointError(f"`{part}` holds `{min(twice)}`, which another file holds too", _REMEDY)
        metadata, tensors = metadata or found, {**tensors, **of_part}
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"`{path}` and its set hold {len(tensors)} tensors, expected {expected}", _REMEDY)
    return GgufHead(first, metadata, tensors)


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return metadata and tensors of one file. Raises CheckpointError."""
    try:
        with open(open_input(path, follow_links=True), "rb") as file:
            size = path.stat().st_size
            return _read_open(_Reader(file, path, size), size)
    except UnreadableFile as error:
        raise CheckpointError(f"`{path}` {error}", _REMEDY) from error
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}", _REMEDY) from error


def _read_open(reader: _Reader, size: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if reader.bytes(4) != _MAGIC:
        raise reader.fail("it does not begin with `GGUF`")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"`{reader.path}` has GGUF version {version if version < 1 << 16 else 'of other byte order'}, "
            f"expected {' or '.join(map(str, _VERSIONS))}",
            "convert the model again with a current llama.cpp",
        )
    tensors, keys = reader.number("Q"), reader.number("Q")
    if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
        raise reader.fail(f"{tensors} tensors and {keys} keys, at most {_MAX_TENSORS} and {_MAX_KEYS} are read")
    metadata = dict[str, Any]()
    for _ in range(keys):
        key = reader.text(_MAX_NAME_BYTES)
        if key in metadata:
            raise reader.fail(f"the key `{key[:80]}` stands there twice")
        metadata[key] = reader.value(reader.number("I"))
    listed = [_read_tensor(reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.fail(f"`general.alignment` is {str(alignment)[:80]}")
    start = -(-reader.at // alignment) * alignment
    found = dict[str, StoredTensor]()
    for name, shape, kind, offset in listed:
        if name in found:
            raise reader.fail(f"the tensor `{name[:80]}` stands there twice")
        kind_name, bytes_of_tensor = _size_of(reader, name, shape, kind)
        if offset % alignment or start + offset + bytes_of_tensor > size:
            raise reader.fail(
                f"`{name[:80]}` lies at bytes {start + offset} to {start + offset + bytes_of_tensor} of {size}"
            )
        found[name] = StoredTensor(reader.path, shape, kind_name, start + offset, bytes_of_tensor)
    _check_apart(reader, found)
    return metadata, found


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of the next tensor."""
    name, dimensions = reader.text(_MAX_NAME_BYTES), reader.number("I")
    if not 0 < dimensions <= _MAX_DIMENSIONS:
        raise reader.fail(f"`{name[:80]}` has {dimensions} dimensions")
    shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, reader.number("I"), reader.number("Q")


def _size_of(reader: _Reader, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """Return the name of a type, and the bytes of a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
        values, block_bytes = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"`{reader.path}`: tensor `{name[:80]}` has the type {kind}, which no known layout uses",
            "install a newer `gguf`, or convert the model to another type",
        ) from error
    if not all(0 < extent < 1 << 40 for extent in shape) or shape[-1] % values:
        raise reader.fail(f"`{name[:80]}` of type {known.name} has the shape {list(shape)}")
    return known.name, math.prod(shape) // values * block_bytes


def _check_apart(reader: _Reader, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that share bytes."""
    end, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset_bytes):
        if tensor.offset_bytes < end:
            raise reader.fail(f"`{name[:80]}` and `{last[:80]}` share bytes")
        end, last = tensor.offset_bytes + tensor.size_bytes, name
