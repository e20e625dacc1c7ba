"""Headers: a valid description of the file, or HeaderError; nothing else, whatever the bytes."""

from __future__ import annotations

import json
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.files.limits import MAX_HEADER_BYTES
from moec.manifests.safetensors_header import (
    ITEM_BYTES,
    MAX_RANK,
    HeaderError,
    build_header,
    read_header,
)

TENSORS = {"a": ("F32", (2, 3)), "b": ("U8", (7,)), "empty": ("U8", (0, 5)), "scalar": ("I64", ())}
DATA_BYTES = 24 + 7 + 0 + 8


def write(folder: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@given(
    tensors=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4).map(tuple)),
        max_size=5,
    ),
    alignment=st.sampled_from((1, 64, 4096)),
)
def test_round_trip(tensors: dict[str, tuple[str, tuple[int, ...]]], alignment: int, tmp_path: Path) -> None:
    header = build_header(tensors, alignment)
    sizes = []
    for dtype, shape in tensors.values():
        sizes.append(ITEM_BYTES[dtype])
        for extent in shape:
            sizes[-1] *= extent
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(sum(sizes)))
    found = read_header(path)
    assert len(header) % alignment == 0
    assert {name: (e.dtype, e.shape) for name, e in found.items()} == tensors
    assert sorted(e.size_bytes for e in found.values()) == sorted(sizes)
    ends = [e.offset_bytes + e.size_bytes for e in found.values()]
    assert [e.offset_bytes for e in found.values()] == [len(header), *ends][: len(found)]


def test_metadata_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, {"__metadata__": {"format": "pt"}, "a": entry("U8", [1], 0, 1)}, b"x")
    assert list(read_header(path)) == ["a"]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xyz", "`b` starts at"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xyz", "`b` starts at"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"xy", "`b` starts at"),
        ({"a": entry("U8", [1], 1, 2)}, b"xy", "`a` starts at"),
        ({"a": entry("U8", [9], 0, 9)}, b"xy", "tensors end at byte"),
        ({"a": entry("U8", [1], 0, 1)}, b"xy", "tensors end at byte"),
        ({"a": entry("U8", [1 << 47], 0, 1 << 47)}, b"xy", "tensors end at byte"),
        ({"a": entry("F64", [1 << 47] * 16, 0, 8)}, b"xy", "shape and dtype take"),
        ({"a": entry("F64", [1 << 47] * 50_000, 0, 8)}, b"xy", f"50000 dimensions, more than {MAX_RANK}"),
        ({"a": entry("U8", [1 << 48], 0, 1 << 48)}, b"", "out of range"),
        ({"a": entry("U8", [-1], 0, -1)}, b"", "out of range"),
        ({"a": entry("U8", [1.0], 0, 1)}, b"x", "out of range"),
        ({"a": entry("U8", [True], 0, 1)}, b"x", "out of range"),
        ({"a": entry("U8", ["1"], 0, 1)}, b"x", "out of range"),
        ({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}, b"x", "out of range"),
        ({"a": entry("U8", [1], 0, 1, 2)}, b"x", "data_offsets say otherwise"),
        ({"a": entry("U8", [1])}, b"x", "data_offsets say otherwise"),
        ({"a": entry("U8", [1], 1, 0)}, b"x", "data_offsets say otherwise"),
        ({"a": entry("U9", [1], 0, 1)}, b"x", "unknown dtype 'U9'"),
        ({"a": entry(["U8"], [1], 0, 1)}, b"x", "unknown dtype"),  # type: ignore[arg-type]
        ({"a": {"dtype": "U8", "shape": [1]}}, b"x", "other fields"),
        ({"a": {**entry("U8", [1], 0, 1), "more": 1}}, b"x", "other fields"),
        ({"a": None}, b"", "other fields"),
        ([], b"", "not an object"),
        (b"", b"", "not strict JSON"),
        (b"{", b"", "not strict JSON"),
        (b'{"a":1,"a":1}', b"", "a field occurs twice"),
        (b"[" * 100_000, b"", "a bracket has no partner"),
        (b"[" * 100_000 + b"]" * 100_000, b"", "nested more than 32 deep"),
        (b"\xff", b"", "not strict JSON"),
    ],
)
def test_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=message) as caught:
        read_header(write(tmp_path, header, data))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [3, 1 << 20, MAX_HEADER_BYTES + 1, 1 << 62, (1 << 64) - 1])
def test_a_declared_length_is_bounded_before_it_is_read(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(HeaderError, match=f"header of {length} bytes does not fit into the file of 10"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    whole = build_header(TENSORS, 8) + bytes(range(DATA_BYTES))
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole)
    assert set(read_header(path)) == set(TENSORS)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(HeaderError):
            read_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(HeaderError, match="tensors end at byte"):
        read_header(path)


@given(changes=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4)), max_size=4))
def test_random_changes(changes: list[tuple[int, bytes, int]], tmp_path: Path) -> None:
    whole = build_header(TENSORS, 8) + bytes(DATA_BYTES)
    for number, new, removed in changes:
        place = number % len(whole)
        whole = whole[:place] + new + whole[place + removed :]
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole)
    try:
        found = read_header(path)
    except HeaderError:
        return
    ranges = sorted((e.offset_bytes, e.offset_bytes + e.size_bytes) for e in found.values())
    assert all(start <= end <= len(whole) for start, end in ranges)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 50) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TENSOR = st.fixed_dictionaries(
    {"dtype": st.just("U8") | JSON, "shape": st.lists(JSON, max_size=3) | JSON, "data_offsets": JSON}
)


@given(header=st.dictionaries(st.text(max_size=4), TENSOR | JSON, max_size=3) | JSON)
def test_random_headers(header: Any, tmp_path: Path) -> None:
    try:
        found = read_header(write(tmp_path, header, b"0123456789"))
    except HeaderError:
        return
    assert sum(e.size_bytes for e in found.values()) == 10
