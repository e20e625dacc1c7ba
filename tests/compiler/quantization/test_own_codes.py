"""Integer codes of a checkpoint in formats of moec: weights to the last bit, and whole compiles that keep them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moec.cli.terminal.report import loss_table
from moec.compiler.calibration.layer_inputs import LayerInputs
from moec.compiler.checkpoint.checkpoint import Checkpoint
from moec.compiler.checkpoint.integer_codes import IntegerCodes, IntegerGrid
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.cluster.remote import experts_quantized_by
from moec.compiler.families import Lowering, lower
from moec.compiler.quantization.layer_quantizer import ExpertQuantizer, LayerQuantizer
from moec.compiler.quantization.own_codes import exact_matrices, held_units, hold_codes, units_held_by
from moec.compiler.quantization.packing import pack, unpack
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import Talk
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.workspace.parallel import workers
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.model.dense_weights import BundleWeights
from tests.compiler.cluster.pool_here import PoolHere
from tests.compiler.lowered import lowered
from tests.tiny_compile import check_bundle, compile_tiny, little_memory

FORMATS = [
    *(f"q{bits}{group}{end}" for bits in (2, 3, 4, 5, 6, 8) for group in ("", "g32", "g64") for end in ("", "s")),
    *("q1g32", "q1.6s", "q1.6g64s", "q4g32b", "mxfp4", "bf16", "q0"),
]
Q4 = QuantSpec.parse("q4g32s")
FORMAT_OF_LAYOUT = {
    "gptq-2": "q3g32s", "gptq-3": "q4g32s", "gptq-4": "q5g32s", "gptq-v2": "q4g32s", "awq": "q5g32s",
    "ct-int4": "q4g32s", "ct-int4-zeros": "q5g32s", "ct-int8": "q8s",
    "gptq-8": "", "gptq-act-order": "", "ct-fp8": "", "ct-mxfp4": "", "fp8-blocks": "", "fp8-ue8m0": "",
}  # fmt: skip
"""The format that holds all units of a checkpoint of each layout. Zeros off the middle take one bit more."""


@st.composite
def stored(draw: st.DrawFn) -> IntegerCodes:
    """Draw codes with zeros in the middle or anywhere, scales of 16 or 32 bits, groups in order or not."""
    bits, size = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([16, 32, 64, 128]))
    groups, rows = draw(st.integers(1, 3)), draw(st.integers(1, 18))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shape = rows, groups
    zeros = torch.full(shape, 1 << (bits - 1))
    if draw(st.booleans()):
        zeros = torch.randint(0, (1 << bits) + 1, shape, generator=generator)
    scales = torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-6, 0.01, 3e4]))
    kind = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    group_of = torch.arange(groups * size) // size
    if draw(st.integers(0, 4)) == 0:
        group_of = group_of[torch.randperm(groups * size, generator=generator)]
    codes = torch.randint(0, 1 << bits, (rows, groups * size), generator=generator).to(torch.uint8)
    codes[:, :2] = torch.tensor([0, (1 << bits) - 1])
    return IntegerCodes(codes, IntegerGrid(bits, zeros.float(), scales.to(kind).float(), group_of))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two float32 tensors are equal to the last bit. Zeros may differ in sign."""
    return torch.equal((one + 0.0).view(torch.int32), (other + 0.0).view(torch.int32))


@given(stored(), st.sampled_from(FORMATS).map(QuantSpec.parse))
def test_a_format_that_fits_holds_the_weights_to_the_last_bit(found: IntegerCodes, spec: QuantSpec) -> None:
    need, weight = found.grid.need(), found.grid.values(found.codes)
    least = need.least_format()
    for fitting in {spec, least} - {None}:
        if fitting is not None and need.is_met_by(fitting):
            data = pack(hold_codes(found, fitting))
            assert same_bits(unpack(data, *weight.shape, fitting).dequantize(), weight)
    assert least is None or need.is_met_by(least)
    if need.is_met_by(spec) and spec.symmetric and not spec.is_ternary:
        assert least is not None and least.bitwidth <= spec.bitwidth


@given(stored(), st.sampled_from(FORMATS).map(QuantSpec.parse))
def test_a_format_that_does_not_fit_cannot_hold_the_weights(found: IntegerCodes, spec: QuantSpec) -> None:
    """Of the formats with float16 scales and equal groups: the extreme codes, or a scale, are out of its reach."""
    grid, need = found.grid, found.grid.need()
    size = spec.group_size or len(grid.group_of)
    if need.is_met_by(spec) or not spec.symmetric or size != need.group_size or not spec.fits(need.columns):
        return
    low, high = (code - grid.zeros + spec.centre for code in (0, (1 << grid.bits) - 1))
    is_in_reach = bool((low >= 0).all() and (high <= spec.largest_code).all())
    half = grid.scales.half()
    assert not (is_in_reach and bool((half.float() == grid.scales).all()) and bool(torch.isfinite(half).all()))


def grid(bits: int = 4, columns: int = 128, groups: int = 2) -> IntegerGrid:
    """Return a grid with its zeros in the middle."""
    middle = torch.full((3, groups), float(1 << (bits - 1)))
    return IntegerGrid(bits, middle, torch.full((3, groups), 0.5), torch.arange(columns) // (columns // groups))


@pytest.mark.parametrize(
    ("changed", "least"),
    [
        (grid(), "q4g64s"),
        (grid(columns=128, groups=1), "q4s"),
        (grid(columns=96, groups=2), None),  # groups of 48
        (grid(columns=32, groups=2), None),  # groups of 16
        (grid(2, groups=4), "q2g32s"),
        (replace(grid(), zeros=torch.full((3, 2), 7.0)), "q5g64s"),
        (replace(grid(8), zeros=torch.full((3, 2), 127.0)), None),  # nine bits
        (replace(grid(), zeros=torch.full((3, 2), 7.5)), None),
        (replace(grid(), zeros=torch.full((3, 2), torch.inf)), None),
        (replace(grid(), zeros=torch.full((3, 2), torch.nan)), None),
        (replace(grid(), scales=torch.full((3, 2), 0.1)), None),  # no float16
        (replace(grid(), scales=torch.full((3, 2), 2.0**17)), None),
        (replace(grid(), scales=torch.full((3, 2), torch.nan)), None),
        (replace(grid(), group_of=torch.arange(128) % 2), None),  # act-order
    ],
)
def test_the_smallest_format(changed: IntegerGrid, least: str | None) -> None:
    found = changed.need().least_format()
    assert (None if found is None else str(found)) == least


def test_formats_with_minima_and_finer_groups_hold_them_too() -> None:
    need = grid().need()
    met = [
        name
        for name in ("q4g64", "q4g32", "q4g32s", "q4g128s", "q4s", "q8g64", "q3g64")
        if need.is_met_by(QuantSpec.parse(name))
    ]
    assert met == ["q4g64", "q4g32", "q4g32s", "q8g64"]
    # A minimum of 7 x 1025 / 2^14 has more bits than float16.
    odd = replace(grid(), zeros=torch.full((3, 2), 7.0), scales=torch.full((3, 2), 1025 / 2**14))
    assert not odd.need().is_met_by(QuantSpec.parse("q4g64")) and odd.need().is_met_by(QuantSpec.parse("q5g64s"))


@pytest.mark.parametrize("layout", FORMAT_OF_LAYOUT)
def test_what_the_original_tools_wrote(layout: str, quantized: Callable[[str], Path]) -> None:
    lowering = lowered(quantized(layout))
    held = held_units(lowering)
    expected = FORMAT_OF_LAYOUT[layout]
    assert {str(spec): count for spec, count in held.items()} == ({expected: 24} if expected else {})
    for unit in lowering.units:
        for spec, matrix in exact_matrices(lowering, unit, list(held)).items():
            assert same_bits(matrix.dequantize(), decoded(lowering, unit)) and spec in held


def test_scales_are_read_once_to_choose_a_format(
    quantized: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(quantized("ct-int4")))
    read, own = list[tuple[str, str]](), Checkpoint.stored_parts

    def noted(found: Checkpoint, name: str, without: str = "") -> dict[str, torch.Tensor]:
        read.append((name, without))
        return own(found, name, without)

    monkeypatch.setattr(Checkpoint, "stored_parts", noted)
    for lowering in (lower(checkpoint), lower(checkpoint)):
        assert held_units(lowering) and units_held_by(lowering, dict.fromkeys(lowering.units, Q4)) == 24
        assert all(exact_matrices(lowering, unit, (QuantSpec(2, 32),)) == {} for unit in lowering.units)
    assert len(read) == len(set(read)) == 24 and {without for _, without in read} == {"weight_packed"}


def decoded(lowering: Lowering, unit: UnitKey) -> torch.Tensor:
    """Return a unit as the reader of the layout decodes it, before it is rounded to 16 bits."""
    name = lowering.units[unit].name
    return lowering.checkpoint.packed[name].decode(lowering.checkpoint.stored_parts(name))


@pytest.mark.parametrize("name", ["gptq", "rtn"])
def test_all_ways_to_a_unit_give_the_same_codes(name: str, quantized: Callable[[str], Path]) -> None:
    """This machine, workers of a cluster and a store without inputs. Other formats are quantized as ever."""
    folder = quantized("ct-int4")
    lowering, specs = lowered(folder), (QuantSpec(2, 32), Q4)
    slot, how = LoadedLayer(lowering), ExpertQuantizer(1, name, specs)
    slot.load(1)
    inputs: LayerInputs | None = None
    with workers(2) as pool:
        plain = list(LayerQuantizer(slot.experts, how).run(inputs, pool))
        here = list(
            LayerQuantizer(slot.experts, how, exact=lambda u, s: exact_matrices(lowering, u, s)).run(inputs, pool)
        )
        there = list(LayerQuantizer(slot.experts, how, experts_quantized_by(PoolHere(folder, 2, 1))).run(inputs, pool))
    store = UnitStore(lowering, name)
    for (expert, own, costs), (_, other, other_costs), (_, rounded, worse) in zip(here, there, plain, strict=True):
        assert costs == other_costs and own.keys() == other.keys() == rounded.keys()
        for (unit, spec), matrix in own.items():
            assert unit.expert == expert and torch.equal(pack_of(matrix), pack_of(other[unit, spec]))
            if spec == Q4:
                assert same_bits(matrix.dequantize(), decoded(lowering, unit))
                assert torch.equal(pack_of(matrix), torch.from_numpy(store.for_bundle(unit, spec)))
                assert costs[unit, spec] < 0.1 * worse[unit, spec]
            else:
                assert (
                    torch.equal(pack_of(matrix), pack_of(rounded[unit, spec]))
                    and costs[unit, spec] == worse[unit, spec]
                )


def pack_of(matrix: object) -> torch.Tensor:
    """Return the bytes of a matrix."""
    return torch.from_numpy(pack(matrix))  # type: ignore[arg-type]


DAMAGED = UnitKey(1, 2, "up")
HELD = "24 of 24 expert projections are stored with codes that `q4g32s` holds; they are taken as they are"


def kept(bundle: Path, source: Path) -> set[UnitKey]:
    """Return the units of a bundle whose weights are those of the checkpoint's parts, to the last bit."""
    checkpoint, weights = open_checkpoint(str(source)), BundleWeights(open_bundle(bundle))
    lowering, found = lower(checkpoint), set[UnitKey]()
    for unit, tensor in lowering.units.items():
        decoded = checkpoint.packed[tensor.name].decode(checkpoint.stored_parts(tensor.name))
        if np.array_equal(weights.unit(unit), decoded.numpy()):
            found.add(unit)
    return found


@pytest.fixture(scope="module")
def searched(
    quantized: Callable[[str], Path], texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A bundle of an int4 checkpoint for a strict target, and the notes of its compile."""
    output, notes = tmp_path_factory.mktemp("searched") / "out", list[str]()
    values: dict[str, Any] = {"data": str(texts), "talk": Talk(notes.append), "comparisons": True}
    compile_tiny(quantized("ct-int4"), output, "kl", 0.004, **values)
    return output, notes


def test_a_search_takes_the_codes_of_the_checkpoint(
    searched: tuple[Path, list[str]], quantized: Callable[[str], Path]
) -> None:
    output, notes = searched
    quality, source = check_bundle(output), quantized("ct-int4")
    assert HELD in notes
    formats = quality["bits"]["formats"]
    assert formats["q4g32s"] >= 18 and "bf16" not in formats
    assert len(kept(output, source)) == formats["q4g32s"]
    assert quality["own_codes"] == {"held": formats["q4g32s"], "of": 24}
    assert quality["sizes"]["expert_bits_per_weight"] <= 4.5
    uniform = next(row for row in quality["comparison"]["baselines"] if row["name"] == "best uniform")
    assert (
        uniform["bits_per_weight"] == 4.5 and uniform["expert_packed_bytes"] >= quality["sizes"]["expert_packed_bytes"]
    )


def test_the_certificate_names_its_baseline(searched: tuple[Path, list[str]]) -> None:
    quality = check_bundle(searched[0])
    assert loss_table(quality).endswith("baseline: the checkpoint's own weights, stored as compressed-tensors, 4 bits")
    card = (searched[0] / "README.md").read_text()
    assert "stores weights as compressed-tensors, 4 bits; what they decode to is the baseline" in card
    assert f"{quality['own_codes']['held']} of 24 expert projections keep the checkpoint's own codes" in card


def test_little_memory_gives_the_same_experts(
    searched: tuple[Path, list[str]],
    quantized: Callable[[str], Path],
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little_memory(monkeypatch.setattr)
    values: dict[str, Any] = {"data": str(texts), "swaps": 0}
    compile_tiny(quantized("ct-int4"), tmp_path / "out", "bits_per_weight", 4.5, **values)
    assert len(kept(tmp_path / "out", quantized("ct-int4"))) == 24


@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize(
    ("layout", "bits", "spec"),
    [("ct-int4", 4, "q4g32s"), ("awq", 5, "q5g32s"), ("ct-int8", 8, "q8s"), ("ct-mxfp4", 4, "mxfp4")],
)
def test_uniform_bits_of_the_codes_keep_them(
    layout: str, bits: int, spec: str, with_data: bool, quantized: Callable[[str], Path], texts: Path, tmp_path: Path
) -> None:
    values, notes = {"data": str(texts)} if with_data else {}, list[str]()
    result = compile_tiny(quantized(layout), tmp_path / "out", "uniform", bits, talk=Talk(notes.append), **values)
    assert not any("rounded to nearest" in note for note in notes)
    assert result.quality["bits"]["formats"] == {spec: 24}
    assert len(kept(tmp_path / "out", quantized(layout))) == 24


def test_a_requested_group_keeps_the_codes_too(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Groups of 32 with minima hold codes in groups of 32; one scale per row cannot."""
    source = quantized("ct-int4")
    for name, values, count in [
        ("minima", {"group_sizes": (32,), "symmetric": False}, 24),
        ("rows", {"group_sizes": (0,)}, 0),
    ]:
        result = compile_tiny(source, tmp_path / name, "uniform", 4, **values)
        assert len(kept(tmp_path / name, source)) == result.quality["own_codes"]["held"] == count


def test_bits_that_are_not_on_offer_are_named(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    notes = list[str]()
    compile_tiny(quantized("awq"), tmp_path / "out", "bits_per_weight", 6, talk=Talk(notes.append))
    named = "`q5g32s` holds, which is not on offer: add 5 to `--bits`"
    assert f"24 of 24 expert projections are stored with codes that {named}" in notes
    result = compile_tiny(quantized("awq"), tmp_path / "five", "bits_per_weight", 6, bits=(2, 4, 5, 16))
    assert result.quality["own_codes"]["held"] == len(kept(tmp_path / "five", quantized("awq"))) > 12


def test_a_quantizer_without_the_format_offers_others(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """optimum-quanto has no symmetric 4 bits, and groups of 64 are too wide for these codes."""
    pytest.importorskip("optimum.quanto")
    result = compile_tiny(quantized("ct-int4"), tmp_path / "out", "uniform", 4, quantizer="quanto")
    assert result.quality["bits"]["formats"] == {"q4g64": 24} and result.quality["own_codes"]["held"] == 0


@pytest.fixture
def damaged(quantized: Callable[[str], Path], tmp_path: Path) -> Path:
    """An int4 checkpoint with a scale that float16 cannot hold."""
    folder = Path(shutil.copytree(quantized("ct-int4"), tmp_path / "damaged"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 1] = torch.tensor(2.0**-30, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("quantizer", ["gptq", "rtn"])
def test_a_unit_that_does_not_fit_is_quantized_as_ever(
    damaged: Path, texts: Path, quantizer: str, tmp_path: Path
) -> None:
    notes = list[str]()
    values: dict[str, Any] = {"data": str(texts), "quantizer": quantizer, "talk": Talk(notes.append)}
    result = compile_tiny(damaged, tmp_path / "out", "uniform", 4, **values)
    assert HELD.replace("24 of", "23 of") in notes
    assert result.quality["bits"]["formats"] == {"q4g32s": 24}
    assert result.quality["own_codes"] == {"held": 23, "of": 24}
    assert kept(tmp_path / "out", damaged) == set(lowered(damaged).units) - {DAMAGED}


def test_groups_that_differ_between_projections(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Down projections in groups of 32, the others with one scale per row: the search is offered both formats."""
    folder = Path(shutil.copytree(quantized("ct-int4"), tmp_path / "mixed"))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_proj.weight_scale", "up_proj.weight_scale"))]:
        tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert {str(s): n for s, n in held_units(lowered(folder)).items()} == {"q4g32s": 24, "q4s": 16}
    uniform = compile_tiny(folder, tmp_path / "uniform", "uniform", 4)
    searched = compile_tiny(folder, tmp_path / "searched", "bits_per_weight", 4.34)
    assert uniform.quality["bits"]["formats"] == {"q4g32s": 24}
    assert searched.quality["bits"]["formats"] == {"q4g32s": 8, "q4s": 16}
    for name in ("uniform", "searched"):
        assert len(kept(tmp_path / name, folder)) == 24
