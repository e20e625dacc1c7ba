"""Attention of one layer over its cache of keys and values.

Shapes: T tokens of any sequences, D hidden, H heads, Hkv key and value heads, Dh head size, S slots, C context, Q
features of the latent vector that keys and values share, R rotated features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moec.manifests.model import AttentionSpec, LatentSpec

from . import kernels
from .rotary import RotaryTables

Weights = Mapping[str, Any]
"""Of one layer by the last part of their names: kernels.PackedMatrix, or a vector as float32."""


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the T tokens of a pass stand. slots, positions: int32 [T].

    ends: int32 [T], of an encoder: where the token's sequence ends, all of which it sees; None: what is behind it.
    """

    slots: np.ndarray
    positions: np.ndarray
    ends: np.ndarray | None = None


class Attention(Protocol):
    """Attention of one layer."""

    def __call__(self, normed: np.ndarray, places: TokenPlaces, keys: Any, values: Any) -> np.ndarray:
        """Store what T tokens leave in the cache, and return what they see. normed [T, D] -> [T, D].

        keys, values: [S, cache heads, C, cache size], arrays of where this attention is computed.
        """
        ...


def layer_weights(dense: Weights, index: int) -> dict[str, Any]:
    """The dense weights of one layer by the last part of their names."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): weight for name, weight in dense.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class DensePart:
    """What may be computed elsewhere: attention by layer, and the head's product, float32 [n, D] -> [n, V]."""

    attentions: Sequence[Attention]
    head: Callable[[np.ndarray], np.ndarray]


def make_attention(
    spec: AttentionSpec,
    weights: Weights,
    norm_eps: float,
    rotary: RotaryTables | None = None,
    bias: np.ndarray | None = None,
) -> Attention:
    """The attention that a layer asks for. bias: [H, 2 C - 1], see relative_bias.bias_by_distance."""
    if spec.latent is not None:
        if rotary is None:
            raise ValueError("latent attention needs a rotary embedding")
        return LatentAttention(spec, spec.latent, weights, rotary)
    return HeadAttention(spec, weights, norm_eps, rotary, bias)


def linear_rows(matrix: Any, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x W^T, with the bias where there is one. [T, K] -> [T, N]."""
    out = np.empty((len(x), matrix.rows), np.float32)
    kernels.linear(matrix, x, out)
    if bias is not None:
        out += bias
    return out


class HeadAttention:
    """Grouped heads with their own keys and values; biases and norms of queries and keys where the model has them."""

    def __init__(
        self,
        spec: AttentionSpec,
        weights: Weights,
        norm_eps: float,
        rotary: RotaryTables | None,
        bias: np.ndarray | None = None,
    ) -> None:
        self._spec, self._weights, self._norm_eps = spec, weights, norm_eps
        self._rotary, self._bias = rotary, bias
        self._matrices = [weights[name] for name in ("query", "key", "value")]
        self._biases = [weights.get(f"{name}_bias") for name in ("query", "key", "value")]

    def __call__(self, normed: np.ndarray, places: TokenPlaces, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        spec, count = self._spec, len(normed)
        query = np.empty((count, spec.num_heads, spec.head_size), np.float32)
        key = np.empty((count, spec.num_kv_heads, spec.head_size), np.float32)
        value = np.empty_like(key)
        flat = [heads.reshape(count, -1) for heads in (query, key, value)]
        kernels.linears(self._matrices, normed, flat)
        for rows, bias in zip(flat, self._biases, strict=True):
            if bias is not None:
                np.add(rows, bias, out=rows)
        if spec.query_key_norm != "none":
            for name, heads in (("query_norm", query), ("key_norm", key)):
                rows = heads.reshape(count, -1) if spec.query_key_norm == "full" else heads.reshape(-1, spec.head_size)
                kernels.rms_norm(rows, self._weights[name], self._norm_eps, rows)
        if self._rotary is not None:
            query, key = (self._rotary.rotate(rows, places.positions) for rows in (query, key))
        kernels.store_kv(key, value, keys, values, places.slots, places.positions)
        mixed = np.empty_like(query)
        kernels.attention(
            query,
            keys,
            values,
            places.slots,
            places.positions,
            spec.score_scale,
            spec.sliding_window,
            mixed,
            self._weights.get("sinks"),
            places.ends,
            self._bias,
        )
        return linear_rows(self._weights["output"], mixed.reshape(count, -1), self._weights.get("output_bias"))


class LatentAttention:
    """Keys and values of all heads from one vector per position, [Q + R], which alone is cached.

    A head's key is never made: its query is brought into the latent space instead (key_up), where it is compared with
    the cached vectors, and their mean is brought out again (value_up). Source: DeepSeek-V2, section 2.1.2.
    """

    def __init__(self, spec: AttentionSpec, latent: LatentSpec, weights: Weights, rotary: RotaryTables) -> None:
        self._spec, self._latent, self._weights, self._rotary = spec, latent, weights, rotary
        self._key_up = _by_head(weights["key_up"], spec.num_heads)
        self._value_up = _by_head(weights["value_up"], spec.num_heads)

    def __call__(self, normed: np.ndarray, places: TokenPlaces, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        spec, rank, count = self._spec, self._latent.rank, len(normed)
        plain, size = self._latent.plain_size, self._spec.cache_size
        heads = self._queries(normed).reshape(count, spec.num_heads, spec.head_size)
        query = np.empty((count, spec.num_heads, size), np.float32)
        for head, matrix in enumerate(self._key_up):
            query[:, head, :rank] = linear_rows(matrix, np.ascontiguousarray(heads[:, head, :plain]))
        query[:, :, rank:] = self._rotary.rotate(np.ascontiguousarray(heads[:, :, plain:]), places.positions)

        shared = linear_rows(self._weights["latent_down"], normed)
        key = np.empty((count, 1, size), np.float32)
        key[:, 0, :rank] = self._normed(np.ascontiguousarray(shared[:, :rank]), "latent_norm")
        key[:, :, rank:] = self._rotary.rotate(np.ascontiguousarray(shared[:, None, rank:]), places.positions)
        kernels.store_kv(key, key, keys, keys, places.slots, places.positions)

        mixed = np.empty_like(query)
        where = places.slots, places.positions
        kernels.attention(query, keys, keys, *where, spec.score_scale, 0, mixed, None, places.ends)
        out = np.empty((count, spec.num_heads, self._latent.value_size), np.float32)
        for head, matrix in enumerate(self._value_up):
            out[:, head] = linear_rows(matrix, np.ascontiguousarray(mixed[:, head, :rank]))
        return linear_rows(self._weights["output"], out.reshape(count, -1))

    def _queries(self, normed: np.ndarray) -> np.ndarray:
        if self._latent.query_rank:
            normed = self._normed(linear_rows(self._weights["query_down"], normed), "query_down_norm")
        return linear_rows(self._weights["query"], normed)

    def _normed(self, rows: np.ndarray, name: str) -> np.ndarray:
        kernels.rms_norm(rows, self._weights[name], self._latent.norm_eps, rows)
        return rows


def _by_head(matrix: kernels.PackedMatrix, heads: int) -> list[kernels.PackedMatrix]:
    """One matrix per head over the same memory: rows come in blocks, of which a head has a whole number."""
    rows, size = matrix.rows // heads, len(matrix.data) // heads
    parts = [matrix.data[head * size : (head + 1) * size] for head in range(heads)]
    return [kernels.PackedMatrix(part, rows, matrix.columns, matrix.spec) for part in parts]
