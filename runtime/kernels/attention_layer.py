"""Attention of a layer, from the residual stream to the residual stream: its weights, and its steps one by one.

Shapes: T tokens, D hidden, H heads, Hkv key and value heads, Dh head size, S slots, C context, R rotated features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .packed_matrix import Floats, Int32s, PackedMatrix, require


@dataclass(kw_only=True)
class AttentionLayer:
    """Weights of grouped heads with their own keys and values, and of the norm in front of them. None: there is none.

    norm: float32 [D]; norm_bias: [D], makes it a layer norm. matrices: of queries [H Dh, D], keys, values [Hkv Dh, D],
    and the output [D, H Dh]; biases: float32, of each. head_norms: RMS norms of queries and keys, [Dh] for each head by
    itself, [H Dh] and [Hkv Dh] for all together. rotation: cosines and sines, [C, R / 2]; interleaved: see
    `reference.rope`. scale, window, sinks: see `reference.attention`; distance_bias: its bias. residual_scale: what the
    result is multiplied with.
    """

    norm: Floats
    norm_eps: float
    matrices: tuple[PackedMatrix, ...]
    kv_heads: int
    head_size: int
    scale: float
    norm_bias: Floats | None = None
    biases: tuple[Floats | None, ...] = (None, None, None, None)
    head_norms: tuple[Floats | None, ...] = (None, None)
    head_norm_eps: float = 0.0
    rotation: tuple[Floats, Floats] | None = None
    interleaved: bool = False
    window: int = 0
    sinks: Floats | None = None
    distance_bias: Floats | None = None
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        """For kernels that keep a form of their own."""

    def attend_in_steps(
        self,
        steps: Any,
        hidden: Floats,
        k_cache: np.ndarray,
        v_cache: np.ndarray,
        slots: Int32s,
        positions: Int32s,
        ends: Int32s | None = None,
    ) -> None:
        """`kernels.attend` by single operations. steps: a module that has them, `reference` or `kernels`."""
        normed, count = norm_stream(steps, hidden, self.norm, self.norm_bias, self.norm_eps), len(hidden)
        *sources, output = self.matrices
        flat = [np.empty((count, matrix.rows), np.float32) for matrix in sources]
        steps.linears(sources, normed, flat)
        _add_biases(flat, self.biases[:3])
        query, key, value = (rows.reshape(count, rows.shape[1] // self.head_size, self.head_size) for rows in flat)
        for heads, norm in zip((query, key), self.head_norms, strict=True):
            if norm is not None:
                width = heads.shape[1] * heads.shape[2]
                require(norm.size in (self.head_size, width), f"head_norms: expected {self.head_size} or {width}")
                rows = heads.reshape(count * width // norm.size, norm.size)
                steps.rms_norm(rows, norm, self.head_norm_eps, rows)
            if self.rotation is not None:
                steps.rope(heads, *self.rotation, positions, self.interleaved)
        steps.store_kv(key, value, k_cache, v_cache, slots, positions)
        mixed = np.empty_like(query)
        seen = (slots, positions, self.scale, self.window, mixed, self.sinks, ends, self.distance_bias)
        steps.attention(query, k_cache, v_cache, *seen)
        steps.linear(output, mixed.reshape(count, output.columns), normed)
        _add_biases([normed], self.biases[3:])
        normed *= np.float32(self.residual_scale)
        hidden += normed


def norm_stream(steps: Any, hidden: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """The residual stream behind an RMS norm, or with a bias behind a layer norm. [T, D] -> [T, D], a new array."""
    normed = np.empty_like(hidden)
    if bias is None:
        steps.rms_norm(hidden, weight, eps, normed)
    else:
        steps.layer_norm(hidden, weight, bias, eps, normed)
    return normed


def _add_biases(rows: Sequence[Floats], biases: Sequence[Floats | None]) -> None:
    for each, bias in zip(rows, biases, strict=True):
        if bias is not None:
            require(bias.shape == each.shape[1:], f"bias: expected shape {each.shape[1:]}, found {bias.shape}")
            np.add(each, bias, out=each)
