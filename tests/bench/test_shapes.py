"""Bundles of random weights in the shape of published models, at a fraction of the size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.shapes.write import SHAPES, random_lowering

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_model_with_weights_of_its_own(name: str, tmp_path: Path) -> None:
    config = SHAPES[name] | {key: 8 for key in EXPERTS if key in SHAPES[name]} | {"vocab_size": 512}
    lowering = random_lowering(name, config, tmp_path)
    assert {layer.experts.count for layer in lowering.model.layers} <= {0, 8}
    for dense, place in list(lowering.dense.items())[-3:]:
        weights = lowering.checkpoint.tensor(place.name)
        assert tuple(weights.shape) == place.shape, dense
        if weights.ndim == 2 and weights.shape[0] > 2:
            assert torch.equal(lowering.checkpoint.tensor(place.name, rows=(1, 3)), weights[1:3])
