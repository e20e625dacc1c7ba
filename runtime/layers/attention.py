"""Attention of one layer over its cache of keys and values, its position tables, and attention to an encoder's states.

Shapes: T tokens of any sequences, D hidden, H heads, Hkv key and value heads, Dh head size, S slots, C context.
Q features of the latent vector that keys and values share, R rotated features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moec.manifests.model import AttentionSpec, LatentSpec, ModelSpec, RelativeBiasSpec, RopeSpec

from .. import kernels
from ..kernels.elementary import natural_log, power, sine_cosine
from .norms import Norm
from .recurrent import recurrent_block


def distance_buckets(distances: np.ndarray, spec: RelativeBiasSpec, sees_ahead: bool) -> np.ndarray:
    """Return the bucket of each distance, int64. A distance is key position - query position, int64.

    Logarithms are float32, as in reference models. They decide for a distance at the edge of a bucket.
    sees_ahead: whether a query sees later keys, as in an encoder. Half of the buckets are then for such keys.
    Otherwise later keys have distance 0.
    """
    buckets, first = spec.buckets, np.zeros_like(distances)
    if sees_ahead:
        buckets //= 2
        first = np.where(distances > 0, buckets, 0)
        away = np.abs(distances)
    else:
        away = -np.minimum(distances, 0)
    exact = buckets // 2
    ratio = natural_log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)).astype(np.float32)
    wide = ratio / np.float32(natural_log(spec.max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + wide.astype(np.int64), buckets - 1)
    return np.asarray(first + np.where(away < exact, away, far), np.int64)


def bias_by_distance(table: np.ndarray, spec: RelativeBiasSpec, context: int, sees_ahead: bool) -> np.ndarray:
    """Return the bias that `kernels.attention` adds to scores: float32 [H, 2 C - 1]; index C - 1 is distance 0.

    table: float32 [B H].
    """
    distances = np.arange(1 - context, context, dtype=np.int64)
    heads = table.reshape(spec.buckets, -1)
    return np.ascontiguousarray(heads[distance_buckets(distances, spec, sees_ahead)].T, dtype=np.float32)


class RotaryTables:
    """Cosines and sines of every position, float32 [C, R / 2]. Angles are float32, as in reference models.

    If the context is longer than the original one, all positions use the long form.
    context: number of positions, C.
    """

    def __init__(self, rope: RopeSpec, context: int) -> None:
        self.rope = rope
        long = rope.long if rope.long is not None and context > rope.long.original_positions else None
        if long is not None or rope.frequencies:
            frequencies = np.array(rope.frequencies if long is None else long.frequencies, np.float32)
        else:
            exponents = np.arange(0, rope.rotary_size, 2, dtype=np.float32) / np.float32(rope.rotary_size)
            powers = power(float(np.float32(rope.theta)), exponents).astype(np.float32)
            frequencies = np.float32(1) / powers
        angles = np.arange(context, dtype=np.float32)[:, None] * frequencies[None, :]
        magnitude = np.float32(rope.magnitude if long is None else long.magnitude)
        sine, cosine = sine_cosine(angles)
        self.cos, self.sin = cosine * magnitude, sine * magnitude


Weights = Mapping[str, Any]
"""Weights of one layer by the last part of their names: kernels.PackedMatrix, or a vector as float32."""


class MixerBlock(Protocol):
    """The mixer of one layer, from the residual stream to the residual stream."""

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, *state: Any) -> None:
        """Store what later tokens need of T tokens, and add the output to the residual stream.

        hidden: residual stream, float32 [T, D], changed in place.
        state: `KVCache.of_layer`. Keys and values, [S, cache heads, C, cache size], or recurrent states.
        """
        ...


def layer_weights(dense: Weights, index: int) -> dict[str, Any]:
    """Return the dense weights of one layer by the last part of their names."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): weight for name, weight in dense.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class DensePart:
    """Computations that an accelerator can do instead of the CPU.

    blocks: mixer of each layer.
    head: product of the head, float32 [n, D] -> [n, V].
    """

    blocks: Sequence[MixerBlock]
    head: Callable[[np.ndarray], np.ndarray]


def make_block(
    model: ModelSpec,
    spec: AttentionSpec,
    weights: Weights,
    norm: Norm,
    rotary: RotaryTables | None = None,
    bias: np.ndarray | None = None,
) -> MixerBlock:
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
            after_norm=weights.get("attention_after_norm"),
            norm_eps=norm.eps,
            matrices=(weights["query"], weights["key"], weights.get("value"), weights["output"]),
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
            gate=weights.get("output_gate"),
            gate_function=spec.output_gate if spec.output_gate != "none" else "sigmoid",
            value_norm=np.ones(spec.head_size, np.float32) if spec.value_norm else None,
            residual_scale=model.residual_scale,
        )

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, *state: Any) -> None:
        kernels.attend(self._layer, hidden, state, places)


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
            after_norm=weights.get("attention_after_norm"),
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

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, *state: Any) -> None:
        kernels.attend(self._layer, hidden, state, places)


def _by_head(matrix: kernels.PackedMatrix, heads: int) -> tuple[kernels.PackedMatrix, ...]:
    """Return one matrix per head over the same memory. Rows are stored in blocks, and a head has whole blocks."""
    rows, size = matrix.rows // heads, len(matrix.data) // heads
    parts = [matrix.data[head * size : (head + 1) * size] for head in range(heads)]
    return tuple(kernels.PackedMatrix(data, rows, matrix.columns, matrix.spec) for data in parts)


def mixer_blocks(
    model: ModelSpec, dense: Weights, weights: Sequence[Weights], norms: Mapping[str, Norm], context: int
) -> list[MixerBlock]:
    """Return the mixer of each layer. Layers with the same rotary embedding share its tables.

    dense: all dense weights by name. weights: those of each layer.
    context: positions of the cache, C.
    """
    ropes = {attention.rope for attention in model.attentions if attention.rope is not None}
    rotary = {rope: RotaryTables(rope, context) for rope in ropes}
    # Biases by distance of the encoder (True) and of the decoder (False), as far as there are any.
    biases = {}
    for sees_ahead in (True, False) if model.encoder is not None else (False,):
        first = 0 if sees_ahead else model.first_decoder_layer
        attention = model.layers[first].attention
        spec = None if attention is None else attention.relative_bias
        if spec is not None:
            table = dense[f"layers.{first}.relative_bias"]
            biases[sees_ahead] = bias_by_distance(table, spec, context, sees_ahead)
    blocks: list[MixerBlock] = []
    for at, layer in enumerate(model.layers):
        norm = norms[f"layers.{at}.attention_norm"]
        if layer.attention is not None:
            tables = None if layer.attention.rope is None else rotary[layer.attention.rope]
            bias = biases.get(at < model.first_decoder_layer)
            blocks.append(make_block(model, layer.attention, weights[at], norm, tables, bias))
        elif layer.recurrent is not None:
            blocks.append(recurrent_block(model, layer.recurrent, weights[at], norm))
    return blocks


class CrossAttention:
    """Attention to another sequence: no positions, no norms, no biases."""

    def __init__(self, spec: AttentionSpec, weights: Weights) -> None:
        self._spec, self._weights, self._rule = spec, weights, kernels.AttentionRule(spec.score_scale)

    def store(
        self, states: np.ndarray, slots: np.ndarray, positions: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> None:
        """Store keys and values of the encoder's states.

        states: [T, D].
        slots, positions: int32 [T].
        """
        projected = [
            np.empty((len(states), self._spec.num_kv_heads, self._spec.head_size), np.float32) for _ in range(2)
        ]
        matrices = [self._weights[f"cross_{name}"] for name in ("key", "value")]
        kernels.linears(matrices, states, [rows.reshape(len(states), -1) for rows in projected])
        kernels.store_kv(projected[0], projected[1], keys, values, slots, positions)

    def __call__(
        self, normed: np.ndarray, prompts: kernels.TokenPlaces, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        """Attend from each token to the prompt of its slot. Returns [T, D].

        normed: [T, D].
        prompts: slots of the tokens, with the lengths of their prompts as ends. The positions have no effect.
        """
        spec = self._spec
        query = linear_rows(self._weights["cross_query"], normed).reshape(-1, spec.num_heads, spec.head_size)
        mixed = np.empty_like(query)
        kernels.attention(query, keys, values, prompts, self._rule, mixed)
        return linear_rows(self._weights["cross_output"], mixed.reshape(len(normed), -1))
