"""Attention of a decoder layer over the encoder's states of the prompt.

Keys and values of the prompt are computed once, after the encoder, and stay in the cache of the slot.
Shapes: T tokens, D hidden, H heads, Dh head size, S slots, C context.
"""

from __future__ import annotations

import numpy as np

from moec.manifests.model import AttentionSpec

from .. import kernels
from .attention import Weights, linear_rows


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
