"""Grouped attention of a layer: its weights, and its single steps. The specification of the extension's AttentionLayer.

Shape letters:
T tokens, D hidden, S slots, C context.
H heads, Hkv heads of keys and values, Dh head size, R rotated features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .elementary import sigmoid, softplus
from .packed_matrix import Floats, PackedMatrix, require
from .stream_layer import AttentionRule, StreamLayer, TokenPlaces, product


@dataclass(kw_only=True)
class AttentionLayer(StreamLayer):
    """Weights of attention with grouped heads. None: the model has no such part.

    matrices: of queries [H Dh, D], keys [Hkv Dh, D], values [Hkv Dh, D], and of the output [D, H Dh]. Without one of
        values, these are the products of the keys.
    value_norm: weight of an RMS norm of each head of values, float32 [Dh].
    biases: float32, one per matrix.
    head_norms: RMS norms of queries and keys. [Dh]: a norm of each head. [H Dh] and [Hkv Dh]: one norm of all heads.

    rotation: cosines and sines, [C, R / 2].
    interleaved: see `reference.rope`.
    scale, window, sinks: see `AttentionRule`; distance_bias is its `bias`.
    gate: [H, D] or [H Dh, D]. Before the output, heads or features are multiplied by a function of its product.
    gate_function: `sigmoid` or `softplus`.
    """

    matrices: tuple[PackedMatrix | None, ...]
    kv_heads: int
    head_size: int
    scale: float
    biases: tuple[Floats | None, ...] = (None, None, None, None)
    head_norms: tuple[Floats | None, ...] = (None, None)
    head_norm_eps: float = 0.0
    rotation: tuple[Floats, Floats] | None = None
    interleaved: bool = False
    window: int = 0
    sinks: Floats | None = None
    distance_bias: Floats | None = None
    gate: PackedMatrix | None = None
    gate_function: str = "sigmoid"
    value_norm: Floats | None = None

    def _mix(self, steps: Any, normed: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> Floats:
        k_cache, v_cache = state
        count = len(normed)
        *sources, output = self.matrices
        present = [matrix for matrix in sources if matrix is not None]
        if output is None or len(present) < 2:
            raise ValueError("matrices: expected those of queries, keys and the output")
        flat = [np.empty((count, matrix.rows), np.float32) for matrix in present]
        steps.linears(present, normed, flat)
        flat += [flat[1].copy()] * (3 - len(flat))
        _add_biases(flat, self.biases[:3])
        if self.value_norm is not None:
            values = flat[2].reshape(-1, self.head_size)
            steps.rms_norm(values, self.value_norm, self.head_norm_eps, values)
        query, key, value = (rows.reshape(count, rows.shape[1] // self.head_size, self.head_size) for rows in flat)
        for heads, norm in zip((query, key), self.head_norms, strict=True):
            if norm is not None:
                width = heads.shape[1] * heads.shape[2]
                require(norm.size in (self.head_size, width), f"head_norms: expected {self.head_size} or {width}")
                rows = heads.reshape(count * width // norm.size, norm.size)
                steps.rms_norm(rows, norm, self.head_norm_eps, rows)
            if self.rotation is not None:
                steps.rope(heads, *self.rotation, places.positions, self.interleaved)
        steps.store_kv(key, value, k_cache, v_cache, places.slots, places.positions)
        mixed = np.empty_like(query)
        rule = AttentionRule(self.scale, self.window, self.sinks, self.distance_bias)
        steps.attention(query, k_cache, v_cache, places, rule, mixed)
        if self.gate is not None:
            function = {"sigmoid": sigmoid, "softplus": softplus}[self.gate_function]
            gates = function(product(steps, self.gate, normed))
            mixed *= gates.reshape(count, mixed.shape[1], gates.shape[1] // mixed.shape[1])
        added = product(steps, output, mixed.reshape(count, output.columns))
        _add_biases([added], self.biases[3:])
        return added


def _add_biases(rows: Sequence[Floats], biases: Sequence[Floats | None]) -> None:
    for product_rows, bias in zip(rows, biases, strict=True):
        if bias is not None:
            require(
                bias.shape == product_rows.shape[1:],
                f"bias: expected shape {product_rows.shape[1:]}, found {bias.shape}",
            )
            np.add(product_rows, bias, out=product_rows)
