"""Layers with a recurrent state: their weights, as the kernels take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moec.manifests.model import ConvolutionSpec, DeltaSpec, ModelSpec

from .. import kernels
from ..kernels.elementary import exp
from .norms import Norm


class RecurrentBlock:
    """A layer with a recurrent state, from the residual stream to the residual stream."""

    def __init__(self, layer: kernels.ConvolutionLayer | kernels.DeltaLayer) -> None:
        self._layer = layer

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, *state: Any) -> None:
        kernels.mix(self._layer, hidden, state, places)


def recurrent_block(
    model: ModelSpec, spec: ConvolutionSpec | DeltaSpec, weights: Mapping[str, Any], norm: Norm
) -> RecurrentBlock:
    """Return a layer with a recurrent state.

    weights: of the layer, by the last part of their names.
    """
    # In a bundle the taps of each feature are adjacent.
    taps = np.ascontiguousarray(weights["taps"].reshape(-1, spec.taps).T)
    shared: dict[str, Any] = {
        "norm": norm.weight,
        "norm_bias": norm.bias,
        "norm_eps": norm.eps,
        "after_norm": weights.get("attention_after_norm"),
        "residual_scale": model.residual_scale,
        "taps": taps,
    }
    if isinstance(spec, ConvolutionSpec):
        return RecurrentBlock(kernels.ConvolutionLayer(input=weights["input"], output=weights["output"], **shared))
    size = spec.key_size
    names = ("query", "key", "value", "output_gate", "rate", "step", "output")
    return RecurrentBlock(
        kernels.DeltaLayer(
            matrices=tuple(weights[name] for name in names),
            decay_rate=exp(np.array(spec.log_rates, np.float32)),
            step_bias=np.array(spec.step_biases, np.float32),
            # A mean square of one is a length of sqrt(Dk). Scores of queries are divided by sqrt(Dk) once more.
            length_scales=(np.full(size, 1 / size, np.float32), np.full(size, 1 / math.sqrt(size), np.float32)),
            output_norm=weights["output_norm"],
            output_norm_eps=spec.norm_eps,
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            **shared,
        )
    )
