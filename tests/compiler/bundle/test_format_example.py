"""The worked example of docs/format.md shows the bytes that the compiler writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.compiler.bundle.emit import BundleContent, emit, finish
from moec.compiler.bundle.publish import publish_directory
from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.request.uniform import uniform_plan
from moec.compiler.workspace.durable import Disk
from moec.manifests.bundle import ExpertEntry, unit_offsets
from moec.manifests.codec import to_plain
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from moec.runtime.bundle.open_bundle import Bundle, open_bundle
from moec.runtime.kernels.packed_matrix import unpack
from tests.compiler.lowered import lowered
from tests.tiny_models import NO_DEVICE, TinyMixtral, save_tiny_mixtral

PAGE = Path(__file__).parents[3] / "docs" / "format.md"
SIZE = 32
FORMATS = {"gate": "q2g32", "up": "q4g32b", "down": "q1g32"}
NAMES_ON_DISK = {"gate": "w1", "up": "w3", "down": "w2"}
LINE_BYTES = 16
DUMP_LINE = re.compile(r"([0-9a-f]{4})(?:  ((?:[0-9a-f]{2} {1,2}){15}[0-9a-f]{2})| {2}\.\.\.|$)")
# Address of a byte, its value in hexadecimal, and (row, column) of the weights that the page reads from it.
READ_BYTES = {
    0x40: (0xE4, "gate", [(0, 0), (0, 4), (0, 8), (0, 12)], [-0.5, -0.25, 0, 0.25]),
    0x1C5: (0x62, "up", [(1, 1), (1, 5)], [-0.75, -0.25]),
    0x441: (0x55, "down", [(0, 1), (0, 5)], [0.25, -0.25]),
}


def matrices() -> dict[str, np.ndarray]:
    """Return the weights of expert 0 by the formulas of the page, float32 [32, 32] each."""
    row, column = np.mgrid[0:SIZE, 0:SIZE].astype(np.int32)
    lane = column // 4 + column % 4
    weights = {
        "gate": 0.25 * ((row + lane) % 4) - 0.5,
        "up": 0.125 * ((row + column) % 16) - 1,
        "down": 0.5 * ((row + lane) % 2) - 0.25,
    }
    return {name: matrix.astype(np.float32) for name, matrix in weights.items()}


def section() -> str:
    """Return the section of the page with the example."""
    return PAGE.read_text(encoding="utf-8").partition("### A worked example")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """A bundle of the example's model, written with the formats of the page."""
    root = tmp_path_factory.mktemp("example")
    shape = TinyMixtral(hidden_size=SIZE, width=SIZE, layers=1, experts=2, heads=1, kv_heads=1)
    weights = save_tiny_mixtral(root / "tiny", shape) / WEIGHTS_NAME
    tensors = load_file(weights)
    for projection, matrix in matrices().items():
        name = f"model.layers.0.block_sparse_moe.experts.0.{NAMES_ON_DISK[projection]}.weight"
        assert tensors[name].shape == matrix.shape
        tensors[name] = torch.from_numpy(matrix).to(torch.bfloat16)
    save_file(tensors, weights, {"format": "pt"})
    lowering = lowered(root / "tiny")
    plan = uniform_plan(lowering.model, QuantSpec(4, SIZE), lowering.spec_16bit, lowering.float_type)
    units = {UnitKey(0, 0, projection): QuantSpec.parse(text) for projection, text in FORMATS.items()}
    plan = replace(plan, units={**plan.units, **units})
    partial, disk = root / "tiny-moec.partial", Disk()
    finish(partial, emit(lowering, BundleContent(plan, NO_DEVICE), partial, disk=disk), b"{}\n", b"# x\n", disk)
    publish_directory(disk, partial, root / "tiny-moec")
    with open_bundle(root / "tiny-moec") as opened:
        yield opened


@pytest.fixture(scope="module")
def entry(bundle: Bundle) -> ExpertEntry:
    return bundle.manifest.experts[0]


@pytest.fixture(scope="module")
def stored(bundle: Bundle, entry: ExpertEntry) -> bytes:
    """The bytes of expert 0."""
    data = np.empty(entry.size_bytes, np.uint8)
    bundle.read_into(entry.file, entry.offset_bytes, data)
    return data.tobytes()


def dump_lines(text: str) -> list[tuple[int, bytes | None, str]]:
    """Return address, bytes (None if the page leaves them out) and the mark after each line: ``, `*` or `...`."""
    lines: list[tuple[int, bytes | None, str]] = []
    for line in text.splitlines():
        if found := DUMP_LINE.match(line):
            lines.append((int(found[1], 16), bytes.fromhex(found[2]) if found[2] else None, ""))
        elif lines and line.split()[0] in ("*", "..."):
            lines[-1] = (*lines[-1][:2], line.split()[0])
        else:
            raise ValueError(f"no line of a dump: {line}")
    return lines


def wrong_lines(text: str, data: bytes) -> list[str]:
    """Return the addresses of the lines of a dump that do not show the data."""
    wrong = []
    lines = dump_lines(text)
    for (address, shown, mark), (end, _, _) in pairwise(lines):
        if shown is None:
            continue
        count = (end - address) // LINE_BYTES if mark == "*" else 1
        is_complete = mark != "" or end == address + LINE_BYTES
        if not is_complete or data[address : address + count * LINE_BYTES] != shown * count:
            wrong.append(f"{address:04x}")
    if lines[-1] != (len(data), None, ""):
        wrong.append("end")
    return wrong


def test_the_dump_shows_the_stored_bytes(stored: bytes) -> None:
    dump = re.search(r"^0000  .*?(?=^```)", section(), re.MULTILINE | re.DOTALL)
    assert dump is not None and len(dump_lines(dump[0])) >= 15
    assert wrong_lines(dump[0], stored) == []


def test_the_entry_is_that_of_the_manifest(entry: ExpertEntry) -> None:
    shown = re.search(r"```json\n(.*?)```", section(), re.DOTALL)
    assert shown is not None and json.loads(shown[1]) == to_plain(entry)


def test_the_table_names_formats_and_sizes(bundle: Bundle, entry: ExpertEntry) -> None:
    rows = re.findall(r"^\| (gate|up|down) \| .+? \| `(\w+)` \| .+ = (\d+) \|$", section(), re.MULTILINE)
    found = {name: (text, int(size)) for name, text, size in rows}
    expected = {name: (str(entry.spec(name)), entry.spec(name).packed_bytes(SIZE, SIZE)) for name in FORMATS}
    assert found == expected


def test_the_stored_weights_are_those_of_the_formulas(bundle: Bundle, entry: ExpertEntry, stored: bytes) -> None:
    specs = {name: entry.spec(name) for name in FORMATS}
    offsets, size = unit_offsets(bundle.manifest.model, 0, specs)
    assert size == len(stored)
    for name, matrix in matrices().items():
        packed = np.frombuffer(stored, np.uint8, specs[name].packed_bytes(SIZE, SIZE), offsets[name])
        np.testing.assert_array_equal(unpack(packed, SIZE, SIZE, specs[name]), matrix, err_msg=name)


@pytest.mark.parametrize("address", READ_BYTES)
def test_the_bytes_that_the_page_reads_mean_what_it_says(address: int, stored: bytes) -> None:
    value, name, places, weights = READ_BYTES[address]
    assert stored[address] == value
    assert f"* Byte {address:04x} is {value:02x}" in section()
    assert [matrices()[name][place] for place in places] == weights


@pytest.mark.parametrize(
    ("dump", "wrong"),
    [
        ("0000  {a}\n*\n0020  {b}   note\n0030", []),
        ("0000  {a}\n...  left out\n0020  {b}\n0030", []),
        ("0000  ...  left out\n0020  {b}\n0030", []),
        ("0000  {a}\n0020  {b}\n0030", ["0000"]),
        ("0000  {a}\n*\n0030", ["0000"]),
        ("0000  {b}\n0010  {a}\n0020  {b}\n0030", ["0000"]),
        ("0000  {a}\n*\n0020  {b}\n0040", ["0020", "end"]),
    ],
)
def test_wrong_dumps_are_found(dump: str, wrong: list[str]) -> None:
    text = dump.format(a=" ".join(["aa"] * 16), b=" ".join(["bb"] * 16))
    assert wrong_lines(text, b"\xaa" * 32 + b"\xbb" * 16) == wrong
