"""Latent attention of a layer, from the residual stream to the residual stream: its weights, and its steps one by one.

Keys and values of all heads come from one vector per position, which alone is cached. A head's key is never made: its
query is brought into the latent space instead (key_up), where it is compared with the cached vectors, and their mean is
brought out again (value_up). Source: DeepSeek-V2, section 2.1.2.
Shapes: T tokens, D hidden, H heads, P plain and R rotated features of a query, Q latent ones, V of a value, S slots, C
context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .packed_matrix import Floats, Int32s, PackedMatrix
from .stream_layer import StreamLayer, TokensInCache, product


@dataclass(kw_only=True)
class LatentLayer(StreamLayer):
    """Weights. None: there is none.

    query: [H (P + R), D], or of what query_down leaves of D features. latent_down: [Q + R, D]. inner_norms: RMS norms
    behind query_down and of the latent features, [Q]. key_up, value_up: of each head, [Q, P] and [V, Q]. output:
    [D, H V]. rotation: cosines and sines, [C, R / 2].
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

    def _attend(self, steps: Any, normed: Floats, tokens: TokensInCache) -> Floats:
        """The cache has one array, [S, 1, C, Q + R]."""
        count, heads, (rank, plain) = len(normed), len(self.key_up), (self.key_up[0].rows, self.key_up[0].columns)
        cache, slots, positions = tokens.k_cache, tokens.slots, tokens.positions
        queries = self._queries(steps, normed).reshape(count, heads, self.query.rows // heads)
        query = np.empty((count, heads, self.latent_down.rows), np.float32)
        for head, matrix in enumerate(self.key_up):
            query[:, head, :rank] = product(steps, matrix, np.ascontiguousarray(queries[:, head, :plain]))
        query[:, :, rank:] = self._rotated(steps, queries[:, :, plain:], positions)

        shared = product(steps, self.latent_down, normed)
        key = np.empty((count, 1, self.latent_down.rows), np.float32)
        latent = np.ascontiguousarray(shared[:, :rank])
        steps.rms_norm(latent, self.inner_norms[1], self.inner_norm_eps, latent)
        key[:, 0, :rank] = latent
        key[:, :, rank:] = self._rotated(steps, shared[:, None, rank:], positions)
        steps.store_kv(key, key, cache, cache, slots, positions)

        mixed = np.empty_like(query)
        steps.attention(query, cache, cache, slots, positions, self.scale, 0, mixed, None, tokens.ends)
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
