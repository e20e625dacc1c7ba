"""Units of a sweep on disk: the bytes that were quantized, the cost of each format, and formats outside the sweep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moec.compiler.families import Lowering
from moec.compiler.quantization.packing import pack, unpack
from moec.compiler.quantization.quantizers.gptq import quantize_gptq
from moec.compiler.quantization.swept_store import SweptStore, stage_name
from moec.compiler.workspace.journal import Journal
from moec.manifests.quant import QuantSpec
from tests.compiler.configured import lowered
from tests.compiler.swept import swept
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

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
