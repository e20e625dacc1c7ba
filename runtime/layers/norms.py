"""The norms of the residual stream.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moec.manifests.model import ModelSpec

from .. import kernels
from ..kernels.stream_layer import norm_stream


class Norm:
    """An RMS norm, or with a bias a layer norm: the mean is subtracted first, the bias is added last."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> None:
        """Create the norm.

        weight: float32 [D].
        bias: float32 [D]; None for an RMS norm.
        """
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Normalise float32 [T, D] into a new array [T, D]."""
        return norm_stream(kernels, hidden, self.weight, self.bias, self.eps)


def stream_norms(model: ModelSpec, dense: Mapping[str, Any]) -> dict[str, Norm]:
    """Return the norms of the residual stream by the name of their weights.

    dense: all dense weights by name.
    """
    kinds = ("attention_norm", "experts_norm", "encoder_norm", "final_norm", "_after_norm", "shared_norm")
    norms = {
        name: Norm(dense[name], dense.get(f"{name}_bias"), model.norm_eps) for name in dense if name.endswith(kinds)
    }
    for index, layer in enumerate(model.layers):
        if layer.experts.router.norm_scale:
            name = f"layers.{index}.router_norm"
            norms[name] = Norm(dense[name] * np.float32(layer.experts.router.norm_scale), None, model.norm_eps)
    return norms
