"""Norms of the residual stream: which kernel runs, under which name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moec.runtime.layers.norms import Norm, stream_norms
from tests.manifests.examples import model_spec

HIDDEN = np.random.default_rng(2).normal(3, 2, (5, 40)).astype(np.float32)
WEIGHT, BIAS = np.random.default_rng(3).normal(size=(2, 40)).astype(np.float32)


def test_with_a_bias_the_mean_goes_first() -> None:
    wide, before = HIDDEN.astype(np.float64), HIDDEN.copy()
    centred = wide - wide.mean(axis=1, keepdims=True)
    rms = WEIGHT * wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    layer = WEIGHT * centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) + BIAS
    assert Norm(WEIGHT, None, 1e-5)(HIDDEN) == pytest.approx(rms, rel=1e-4, abs=1e-5)
    assert Norm(WEIGHT, BIAS, 1e-5)(HIDDEN) == pytest.approx(layer, rel=1e-4, abs=1e-5)
    assert np.array_equal(HIDDEN, before)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_every_norm_of_the_stream_has_its_own_weights(kind: str) -> None:
    model = replace(model_spec(), norm=kind)
    generator = np.random.default_rng(4)
    dense = {name: generator.normal(size=shape).astype(np.float32) for name, shape in model.dense_shapes().items()}
    norms = stream_norms(model, dense)
    layers = [f"layers.{at}.{name}" for at in range(model.num_layers) for name in ("attention_norm", "experts_norm")]
    assert sorted(norms) == sorted([*layers, "final_norm"])
    hidden = generator.normal(size=(1, model.hidden_size)).astype(np.float32)
    for name, norm in norms.items():
        bias = dense[f"{name}_bias"] if kind == "layer" else None
        assert np.array_equal(norm(hidden), Norm(dense[name], bias, model.norm_eps)(hidden))
