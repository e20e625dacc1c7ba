"""A manifest that contradicts itself cannot be built."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moec.manifests.bundle import (
    BundleManifest,
    DeviceSummary,
    FileEntry,
    low_experts_file_name,
    unit_offsets,
    version_of,
)
from moec.manifests.codec import decode_manifest, encode_manifest, to_plain
from moec.manifests.errors import ManifestInvalid
from moec.manifests.model import PROJECTIONS, ExpertKey
from moec.manifests.quant import QuantSpec
from tests.manifests.examples import BF16, SHA, build_manifest, example_manifest, layer_spec, model_spec, seal

BASE = example_manifest()
E = BASE.experts
Q8, Q2 = QuantSpec(8), QuantSpec(2, 32)


def swapped(items: tuple[Any, ...], a: int, b: int) -> tuple[Any, ...]:
    found = list(items)
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def with_item(items: tuple[Any, ...], index: int, **changes: Any) -> tuple[Any, ...]:
    return (*items[:index], replace(items[index], **changes), *items[index + 1 :])


def without(items: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    return tuple(item for item in items if item.name != name)


ROUTER = next(i for i, entry in enumerate(BASE.dense) if entry.name == "layers.0.router")
NORM = next(i for i, entry in enumerate(BASE.dense) if entry.name == "layers.1.experts_norm")
FILE_END = E[2].offset_bytes + E[2].size_bytes

CONTRADICTIONS: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    ("expert missing", lambda: {"experts": E[:-1]}, "expected all 7 of the model once each, in order"),
    ("expert twice", lambda: {"experts": (E[0], *E[:-1])}, "expected all 7"),
    ("expert too many", lambda: {"experts": (*E, E[-1])}, "expected all 7"),
    ("experts out of order", lambda: {"experts": swapped(E, 0, 1)}, "in order"),
    ("no expert", lambda: {"experts": ()}, "expected all 7"),
    ("size too large", lambda: {"experts": with_item(E, 0, size_bytes=1 << 20)}, r"experts\[0, 0\]: its"),
    ("format of another size", lambda: {"experts": with_item(E, 2, up=BF16, down=BF16)}, "size_bytes says"),
    ("format that does not fit", lambda: {"experts": with_item(E, 0, gate=QuantSpec(4, 64))}, "cannot hold"),
    ("overlap", lambda: {"experts": with_item(E, 1, offset_bytes=E[0].offset_bytes)}, r"\[0, 1\]: overlaps"),
    ("outside its file", lambda: {"experts": with_item(E, 2, offset_bytes=FILE_END)}, r"\[0, 2\]: lies outside"),
    ("another layer's file", lambda: {"experts": with_item(E, 0, file=E[-1].file)}, "expected file `experts-00000"),
    ("file not listed", lambda: {"files": without(BASE.files, E[0].file)}, r"\[0, 0\]: lies outside"),
    ("file twice", lambda: {"files": (*BASE.files, BASE.files[0])}, "a name occurs twice"),
    ("lists itself", lambda: {"files": (*BASE.files, FileEntry("moec.json", 1, SHA))}, "lists itself"),
    ("layout", lambda: {"layout": "rows32"}, "layout: expected `rows16`, found `rows32`"),
    ("required set", lambda: {"required_cpu_features": ("avx2",)}, "expected no instruction set, found `avx2`"),
    ("router below 16 bits", lambda: {"dense": with_item(BASE.dense, ROUTER, spec=Q8)}, "routers and rates stay at 16"),
    ("norm below 16 bits", lambda: {"dense": with_item(BASE.dense, NORM, spec=Q8)}, "norms, routers and rates stay"),
    ("dense missing", lambda: {"dense": BASE.dense[1:]}, "every dense weight of the model once"),
    ("dense out of order", lambda: {"dense": swapped(BASE.dense, 2, 3)}, "in order"),
    ("dense shape", lambda: {"dense": with_item(BASE.dense, 0, shape=(51, 32))}, r"dense\[embedding\]: expected shape"),
    ("version too low", lambda: {"dense": with_item(BASE.dense, 0, spec=QuantSpec(5))}, "need 2, found 1"),
    ("version too high", lambda: {"format_version": 2}, "format_version: its contents need 1, found 2"),
    ("dense format", lambda: {"dense": with_item(BASE.dense, 0, spec=QuantSpec(4, 64))}, "cannot hold 32 columns"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS])
def test_contradiction(changes: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes())


@pytest.mark.parametrize(("text", "version"), [("q4g32", 1), ("q5g32", 2), ("q5g32b", 2), ("q6s", 2), ("q8", 1)])
def test_five_and_six_bits_need_version_2(text: str, version: int) -> None:
    """The version follows from experts, dense weights and low versions alike."""
    new, model = QuantSpec.parse(text), model_spec()
    expert = build_manifest(model, [(BF16, Q8, new)], [BF16])
    dense = build_manifest(model, [(BF16, Q8, Q8)], [BF16, new])
    assert expert.format_version == dense.format_version == version
    low = replace(expert.experts[0], file=low_experts_file_name(0), size_bytes=1 << 12)
    assert version_of(model, (), (low,)) == version
    for manifest in (expert, dense):
        assert decode_manifest(encode_manifest(manifest), "moec.json") == manifest
        with pytest.raises(ManifestInvalid, match=f"its contents need {version}, found {3 - version}"):
            decode_manifest(seal({**to_plain(manifest), "format_version": 3 - version}), "moec.json")


@pytest.mark.parametrize("name", BASE.cost.__slots__)
@pytest.mark.parametrize("value", [-1, 1 << 60])
def test_costs_are_those_of_the_formats(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"cost.{name}"):
        replace(BASE, cost=replace(BASE.cost, **{name: value}))


def test_an_absurd_model_is_refused_before_its_experts_are_listed() -> None:
    giant = replace(BASE.model, layers=(layer_spec(experts=65535, top_k=1),) * 1024)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="expected all 67107840 of the model"):
            replace(BASE, model=giant)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../dense.safetensors"}, {"name": "/etc/passwd"}, {"name": ".."}, {"name": "."}, {"name": ""},
        {"name": "a/b"}, {"name": "a\\b"}, {"name": "a\0"}, {"name": "a\n"}, {"name": ".hidden"}, {"name": "x" * 201},
        {"name": "\u00e9"}, {"size_bytes": -1}, {"size_bytes": (1 << 46) + 1}, {"sha256": "0" * 63},
        {"sha256": "A" * 64}, {"sha256": "0" * 64 + "\n"},
    ],
)  # fmt: skip
def test_file_entries(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        FileEntry(**{"name": "a", "size_bytes": 0, "sha256": SHA, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": -1}, {"expert": -1}, {"layer": 1 << 16}, {"expert": 65535}, {"file": "../x"},
        {"xxh3": ""}, {"xxh3": "0" * 64},
        {"offset_bytes": -4096}, {"offset_bytes": 100}, {"offset_bytes": 1 << 47},
        {"size_bytes": 0}, {"size_bytes": -4096}, {"size_bytes": 100}, {"size_bytes": 1 << 47},
    ],
)  # fmt: skip
def test_expert_entries(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(E[0], **changes)


def test_device_numbers_are_not_negative() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        DeviceSummary("host", SHA, 0, -1)


def test_units_lie_in_order_on_64_bytes_and_experts_on_4096() -> None:
    model = model_spec([layer_spec(width=96)])
    offsets, size = unit_offsets(model, 0, {"gate": QuantSpec(3), "up": BF16, "down": Q2})
    gate, up, down = 96 * 32 * 3 // 8 + 96 * 4, 96 * 32 * 2, 32 * 96 * 2 // 8 + 32 * 3 * 4
    assert list(offsets) == list(PROJECTIONS)
    assert offsets == {"gate": 0, "up": -(-gate // 64) * 64, "down": -(-gate // 64) * 64 + up}
    assert size == -(-(offsets["down"] + down) // 4096) * 4096


def test_entries_answer_for_their_units() -> None:
    assert E[4].key == ExpertKey(1, 1)
    assert [E[0].spec(projection) for projection in PROJECTIONS] == [E[0].gate, E[0].up, E[0].down]
    assert isinstance(replace(BASE, calibration=None), BundleManifest)
