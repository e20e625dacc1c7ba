"""Latent attention of a layer: its weights, and its single steps. The specification of the extension's LatentLayer.

The keys and values of all heads come from one vector per position, and only this vector is cached. The keys of a head
are never computed. Instead `key_up` maps the query of the head into the latent space, where it is compared with the
cached vectors. `value_up` maps the weighted mean of these vectors to the value of the head.
Source: DeepSeek-V2, section 2.1.2.

Shape letters:
T tokens, D hidden, H heads, S slots, C context.
P plain features, R rotated features of a query; Q latent features; V features of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .packed_matrix import Floats, Int32s, PackedMatrix
from .stream_layer import AttentionRule, StreamLayer, TokenPlaces, product


@dataclass(kw_only=True)
class LatentLayer(StreamLayer):
    """Weights of latent attention. None: the model has no such part.

    query: [H (P + R), D], or [H (P + R), rows of query_down].
    latent_down: [Q + R, D].
    inner_norms: RMS norms after query_down, [rows of query_down] or None, and of the latent features, [Q].

    key_up, value_up: one matrix per head, [Q, P] and [V, Q].
    output: [D, H V].
    rotation: cosines and sines, [C, R / 2].
    interleaved: see `reference.rope`.
    query_down: [rows, D].
    """

    query: PackedMatrix
    latent_down: PackedMatrix
    inner_norms: tuple[Floats | None, Floats]
    inner_norm_eps: float
    key_up: tuple[PackedMatrix, ...]
    value_up: tuple[PackedMatrix, ...]
    output: PackedMatrix
    rotation: tuple[Floats, Floats]
    interleaved: bool
    scale: float
    query_down: PackedMatrix | None = None

    def _mix(self, steps: Any, normed: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> Floats:
        k_cache, v_cache = state
        """Compute attention. The cache is one array, [S, 1, C, Q + R], in both k_cache and v_cache."""
        count, heads = len(normed), len(self.key_up)
        rank, plain = self.key_up[0].rows, self.key_up[0].columns
        queries = self._queries(steps, normed).reshape(count, heads, self.query.rows // heads)
        query = np.empty((count, heads, self.latent_down.rows), np.float32)
        for head, matrix in enumerate(self.key_up):
            query[:, head, :rank] = product(steps, matrix, np.ascontiguousarray(queries[:, head, :plain]))
        query[:, :, rank:] = self._rotated(steps, queries[:, :, plain:], places.positions)

        shared = product(steps, self.latent_down, normed)
        key = np.empty((count, 1, self.latent_down.rows), np.float32)
        latent = np.ascontiguousarray(shared[:, :rank])
        steps.rms_norm(latent, self.inner_norms[1], self.inner_norm_eps, latent)
        key[:, 0, :rank] = latent
        key[:, :, rank:] = self._rotated(steps, shared[:, None, rank:], places.positions)
        steps.store_kv(key, key, k_cache, v_cache, places.slots, places.positions)

        mixed = np.empty_like(query)
        steps.attention(query, k_cache, v_cache, places, AttentionRule(self.scale), mixed)
        seen = np.empty((count, heads, self.value_up[0].rows), np.float32)
        for head, matrix in enumerate(self.value_up):
            seen[:, head] = product(steps, matrix, np.ascontiguousarray(mixed[:, head, :rank]))
        return product(steps, self.output, seen.reshape(count, self.output.columns))

    def _queries(self, steps: Any, normed: Floats) -> Floats:
        if self.query_down is not None:
            normed = product(steps, self.query_down, normed)
            steps.rms_norm(normed, self.inner_norms[0], self.inner_norm_eps, normed)
        return product(steps, self.query, normed)

    def _rotated(self, steps: Any, heads: np.ndarray, positions: Int32s) -> Floats:
        turned = np.array(heads)
        steps.rope(turned, *self.rotation, positions, self.interleaved)
        return turned
