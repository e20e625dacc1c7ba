"""Attention of one layer over its cache of keys and values.

Shapes: T tokens of any sequences, D hidden, H heads, Hkv key and value heads, Dh head size, S slots, C context.
Q features of the latent vector that keys and values share, R rotated features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moec.manifests.model import AttentionSpec, LatentSpec, ModelSpec

from .. import kernels
from .norms import Norm
from .relative_bias import bias_by_distance
from .rotary import RotaryTables

Weights = Mapping[str, Any]
"""Weights of one layer by the last part of their names: kernels.PackedMatrix, or a vector as float32."""


class AttentionBlock(Protocol):
    """Attention of one layer, from the residual stream to the residual stream."""

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, keys: Any, values: Any) -> None:
        """Store keys and values of T tokens, and add the attention output to the residual stream.

        hidden: residual stream, float32 [T, D], changed in place.
        keys, values: [S, cache heads, C, cache size], arrays of the device that computes this attention.
        """
        ...


def layer_weights(dense: Weights, index: int) -> dict[str, Any]:
    """Return the dense weights of one layer by the last part of their names."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): weight for name, weight in dense.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class DensePart:
    """Computations that an accelerator can do instead of the CPU.

    blocks: attention of each layer.
    head: product of the head, float32 [n, D] -> [n, V].
    """

    blocks: Sequence[AttentionBlock]
    head: Callable[[np.ndarray], np.ndarray]


def make_block(
    model: ModelSpec,
    spec: AttentionSpec,
    weights: Weights,
    norm: Norm,
    rotary: RotaryTables | None = None,
    bias: np.ndarray | None = None,
) -> AttentionBlock:
    """Return the attention of a layer.

    bias: [H, 2 C - 1], see relative_bias.bias_by_distance.
    """
    if spec.latent is None:
        return HeadAttention(model, spec, weights, norm, rotary, bias)
    if rotary is None:
        raise ValueError("latent attention needs a rotary embedding")
    return LatentAttention(spec, spec.latent, weights, norm, rotary, model.residual_scale)


def linear_rows(matrix: Any, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return x W^T, with the bias if there is one. [T, K] -> [T, N]."""
    out = np.empty((len(x), matrix.rows), np.float32)
    kernels.linear(matrix, x, out)
    if bias is not None:
        out += bias
    return out


class HeadAttention:
    """Attention with separate keys and values for each head group.

    Biases and norms of queries and keys are used if the model has them.
    """

    def __init__(
        self,
        model: ModelSpec,
        spec: AttentionSpec,
        weights: Weights,
        norm: Norm,
        rotary: RotaryTables | None,
        bias: np.ndarray | None = None,
    ) -> None:
        """Bind the weights.

        bias: as in `make_block`.
        """
        self._layer = kernels.AttentionLayer(
            norm=norm.weight,
            norm_bias=norm.bias,
            norm_eps=norm.eps,
            matrices=(weights["query"], weights["key"], weights["value"], weights["output"]),
            biases=tuple(weights.get(f"{name}_bias") for name in ("query", "key", "value", "output")),
            head_norms=(weights.get("query_norm"), weights.get("key_norm")),
            head_norm_eps=model.norm_eps,
            rotation=None if rotary is None else (rotary.cos, rotary.sin),
            interleaved=rotary is not None and rotary.rope.interleaved,
            kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            scale=spec.score_scale,
            window=spec.sliding_window,
            sinks=weights.get("sinks"),
            distance_bias=bias,
            residual_scale=model.residual_scale,
        )

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, keys: np.ndarray, values: np.ndarray) -> None:
        kernels.attend(self._layer, hidden, keys, values, places)


class LatentAttention:
    """Attention with keys and values of all heads from one vector per position, [Q + R]: `kernels.LatentLayer`."""

    def __init__(
        self,
        spec: AttentionSpec,
        latent: LatentSpec,
        weights: Weights,
        norm: Norm,
        rotary: RotaryTables,
        residual_scale: float,
    ) -> None:
        self._layer = kernels.LatentLayer(
            norm=norm.weight,
            norm_bias=norm.bias,
            norm_eps=norm.eps,
            query_down=weights.get("query_down"),
            query=weights["query"],
            latent_down=weights["latent_down"],
            inner_norms=(weights.get("query_down_norm"), weights["latent_norm"]),
            inner_norm_eps=latent.norm_eps,
            key_up=_by_head(weights["key_up"], spec.num_heads),
            value_up=_by_head(weights["value_up"], spec.num_heads),
            output=weights["output"],
            rotation=(rotary.cos, rotary.sin),
            interleaved=rotary.rope.interleaved,
            scale=spec.score_scale,
            residual_scale=residual_scale,
        )

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, keys: np.ndarray, values: np.ndarray) -> None:
        kernels.attend(self._layer, hidden, keys, values, places)


def _by_head(matrix: kernels.PackedMatrix, heads: int) -> tuple[kernels.PackedMatrix, ...]:
    """Return one matrix per head over the same memory. Rows are stored in blocks, and a head has whole blocks."""
    rows, size = matrix.rows // heads, len(matrix.data) // heads
    parts = [matrix.data[head * size : (head + 1) * size] for head in range(heads)]
    return tuple(kernels.PackedMatrix(data, rows, matrix.columns, matrix.spec) for data in parts)


def attention_blocks(
    model: ModelSpec, dense: Weights, weights: Sequence[Weights], norms: Mapping[str, Norm], context: int
) -> list[AttentionBlock]:
    """Return the attention of each layer. Layers with the same rotary embedding share its tables.

    dense: all dense weights by name. weights: those of each layer.
    context: positions of the cache, C.
    """
    ropes = {layer.attention.rope for layer in model.layers if layer.attention.rope is not None}
    rotary = {rope: RotaryTables(rope, context) for rope in ropes}
    # Biases by distance of the encoder (True) and of the decoder (False), as far as there are any.
    biases = {}
    for sees_ahead in (True, False) if model.encoder is not None else (False,):
        first = 0 if sees_ahead else model.first_decoder_layer
        spec = model.layers[first].attention.relative_bias
        if spec is not None:
            table = dense[f"layers.{first}.relative_bias"]
            biases[sees_ahead] = bias_by_distance(table, spec, context, sees_ahead)
    blocks = []
    for at, layer in enumerate(model.layers):
        tables = None if layer.attention.rope is None else rotary[layer.attention.rope]
        bias = biases.get(at < model.first_decoder_layer)
        blocks.append(
            make_block(model, layer.attention, weights[at], norms[f"layers.{at}.attention_norm"], tables, bias)
        )
    return blocks
