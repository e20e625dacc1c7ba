"""Stores of units: formats that a weight exceeds, and units of a sweep on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.families import Lowering
from moec.compiler.quantization.layer_quantizer import ExpertQuantizer
from moec.compiler.quantization.packing import pack, unpack
from moec.compiler.quantization.quantized import RangeExceeded
from moec.compiler.quantization.quantizers.gptq import quantize_gptq
from moec.compiler.quantization.quantizers.rtn import holds, quantize_rtn
from moec.compiler.quantization.swept_store import SweptStore, stage_name
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import plain_plan
from moec.compiler.request.targets import ByteWeights
from moec.compiler.search.space import build_space
from moec.compiler.sensitivity.sensitivity import SensitivityTable
from moec.compiler.workspace.journal import Journal
from moec.manifests.errors import CheckpointError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.lowered import lowered, swept
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

THREE, EIGHT, BYTES = QuantSpec(3, 32), QuantSpec(8), QuantSpec.parse("q4g32b")
WIDE = UnitKey(0, 1, "gate")
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("spec", [THREE, EIGHT, BYTES, QuantSpec(1), QuantSpec(2, 0, symmetric=True)])
@pytest.mark.parametrize("value", [6e4, 7e4, -7e4, 2e5, 3e6, -3e7, 1e38])
def test_what_holds_is_what_can_be_rounded(spec: QuantSpec, value: float) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[3, 5] = value
    if holds(weight, spec):
        assert torch.isfinite(quantize_rtn(weight, spec).dequantize()).all()
    else:
        with pytest.raises(RangeExceeded):
            quantize_rtn(weight, spec, clip_search=True)


@pytest.mark.parametrize("has_moments", [False, True])
def test_an_expert_loses_the_formats_of_one_matrix(has_moments: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(32, 64, generator=generator) for name in ("gate", "up")}
    weights["down"] = torch.randn(64, 32, generator=generator)
    weights["gate"][0, 0] = 3e6
    inputs = [torch.randn(128, size, generator=generator) for size in (64, 32)]
    moments = (inputs[0].T @ inputs[0], inputs[1].T @ inputs[1]) if has_moments else None
    quantizer = ExpertQuantizer(0, "gptq", (THREE, EIGHT, BYTES))
    found = quantizer.run(1, weights, moments, 128 if has_moments else 0)
    assert {spec for unit, spec in found if unit == WIDE} == {EIGHT} or (WIDE, THREE) not in found
    for name in ("up", "down"):
        assert {spec for unit, spec in found if unit.projection == name} == {THREE, EIGHT, BYTES}
    assert all(torch.isfinite(matrix.dequantize()).all() for matrix in found.values())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e20])
@pytest.mark.parametrize(("at", "named"), [(0, "gate and up"), (1, "down")])
def test_inputs_beyond_float32_are_refused_by_place(at: int, named: str, value: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(32, 32, generator=generator) for name in ("gate", "up", "down")}
    inputs = [torch.randn(64, 32, generator=generator) for _ in range(2)]
    inputs[at][3, 5] = value
    with pytest.raises(CheckpointError, match=f"layer 2, expert 1: .* the inputs of {named} on the calibration texts"):
        ExpertQuantizer(2, "gptq", (THREE,)).run(1, weights, (inputs[0].T @ inputs[0], inputs[1].T @ inputs[1]), 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint with an expert and an embedding beyond float16."""
    path = save_tiny_mixtral(tmp_path / "tiny", TinyMixtral())
    tensors = load_file(path / WEIGHTS_NAME)
    tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"][0, 0] = 3e6
    tensors[EMBEDDING][2, 3] = 1e8
    save_file(tensors, path / WEIGHTS_NAME)
    return path


@pytest.mark.parametrize("specs", [(THREE,), (THREE, QuantSpec(16, float_type="bfloat16"))])
def test_a_unit_that_no_format_holds_keeps_sixteen_bits(folder: Path, specs: tuple[QuantSpec, ...]) -> None:
    lowering = lowered(folder)
    store, model = UnitStore(lowering, "rtn"), lowering.model
    assert not store.holds(WIDE, THREE) and store.holds(UnitKey(0, 0, "gate"), THREE)
    assert store.held_by_all([THREE, lowering.spec_16bit]) == [lowering.spec_16bit]
    plain = plain_plan(model, lowering.spec_16bit, "rtn")
    (dense,) = store.held_dense([{name: EIGHT if len(s) == 2 else plain.dense[name] for name, s in
                                  model.dense_shapes().items()}])  # fmt: skip
    assert dense["embedding"].bitwidth == 16 and dense["lm_head"].bitwidth == 8
    experts = max(layer.experts.count for layer in model.layers)
    groups = {"embedding": 1.0, "lm_head": 1.0}
    groups |= {f"layers.{layer}.attention": 1.0 for layer in range(model.num_layers)}
    table = SensitivityTable(np.ones((model.num_layers, 3)), groups, np.ones((model.num_layers, experts)))
    weights = ByteWeights(np.ones((model.num_layers, experts)), 1.0, 1.0)
    space = build_space(plain, store, table, weights, specs, [dense])
    assert np.isfinite(space.table.costs).any(1).all()
    least = space.plan(np.where(np.isfinite(space.table.costs), space.table.costs, np.inf).argmin(1))
    assert least.units[WIDE].bitwidth == 16
    assert least.units[UnitKey(0, 0, "gate")] == THREE


SPECS = (QuantSpec(3, 32), QuantSpec(4, 64))
PAIRS = [([5, 6, 200, 7, 90], [33, 8]), ([1, 2], [3]), ([250, 9, 8, 7, 6, 5], [4, 3, 2, 1])]


@pytest.fixture(scope="module")
def lowering(tmp_path_factory: pytest.TempPathFactory) -> Lowering:
    """96 columns of the down projections are not groups of 64."""
    return lowered(save_tiny_mixtral(tmp_path_factory.mktemp("store") / "tiny", TinyMixtral(width=96)))


@pytest.fixture
def store(lowering: Lowering, tmp_path: Path) -> tuple[SweptStore, Journal]:
    _, store, journal = swept(lowering, PAIRS, tmp_path / "out.work", SPECS, "gptq")
    return store, journal


def test_bytes_on_disk_are_those_of_the_bundle(lowering: Lowering, store: tuple[SweptStore, Journal]) -> None:
    for unit in lowering.model.unit_keys():
        rows, columns = lowering.model.unit_shape(unit.layer, unit.projection)
        for spec in (spec for spec in SPECS if spec.fits(columns)):
            data = store[0].for_bundle(unit, spec)
            assert np.array_equal(data, pack(store[0].matrix(unit, spec)))
            assert torch.equal(store[0].weight(unit, spec), unpack(data, rows, columns, spec).dequantize())
            assert store[0].error(unit, spec) > 0
        assert store[0].error(unit, lowering.spec_16bit) == 0
        assert torch.equal(store[0].weight(unit, lowering.spec_16bit), lowering.unit(unit).float())


def test_a_format_that_was_not_swept_is_rounded_when_it_is_needed(
    lowering: Lowering, store: tuple[SweptStore, Journal]
) -> None:
    """EdgeMoE's search takes 8 bits in the group size of the best uniform format."""
    other = QuantSpec(8, 32)
    for unit in lowering.model.unit_keys():
        expected = quantize_gptq(lowering.unit(unit).float(), other, None, 0)
        assert torch.equal(store[0].weight(unit, other), expected.dequantize())
        assert np.array_equal(store[0].for_bundle(unit, other), pack(expected))


def test_a_layer_without_its_files_or_costs_is_not_taken_over(
    lowering: Lowering, store: tuple[SweptStore, Journal]
) -> None:
    other = SweptStore(lowering, "gptq", SPECS, store[1])
    costs = store[1].arrays("layer-0", dict)["costs"]
    assert other.add_layer(0, costs) and not other.add_layer(0, costs[:, :-1])
    store[1].forget(stage_name(0, SPECS[1]))
    assert not other.add_layer(0, costs)
