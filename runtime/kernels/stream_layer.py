"""Where an attention stands: behind a norm of the residual stream, to which its scaled result is added.

Shapes: T tokens, D hidden, S slots, C context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .packed_matrix import Floats, Int32s, PackedMatrix


class TokensInCache(NamedTuple):
    """The cache of keys and values, and where in it tokens stand and what they see: see `kernels.attention`."""

    k_cache: np.ndarray
    v_cache: np.ndarray
    slots: Int32s
    positions: Int32s
    ends: Int32s | None


@dataclass(kw_only=True)
class StreamLayer:
    """Both ends of a layer of attention in the residual stream.

    norm: float32 [D], of an RMS norm; norm_bias: [D], makes it a layer norm, None: there is none. residual_scale: what
    the result is multiplied with.
    """

    norm: Floats
    norm_eps: float
    norm_bias: Floats | None = None
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
        normed = norm_stream(steps, hidden, self.norm, self.norm_bias, self.norm_eps)
        added = self._attend(steps, normed, TokensInCache(k_cache, v_cache, slots, positions, ends))
        added *= np.float32(self.residual_scale)
        hidden += added

    def _attend(self, steps: Any, normed: Floats, tokens: TokensInCache) -> Floats:
        """What the attention makes of the normed stream, a new array. [T, D] -> [T, D]; keys and values are stored."""
        raise NotImplementedError


def norm_stream(steps: Any, hidden: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """The residual stream behind an RMS norm, or with a bias behind a layer norm. [T, D] -> [T, D], a new array."""
    normed = np.empty_like(hidden)
    if bias is None:
        steps.rms_norm(hidden, weight, eps, normed)
    else:
        steps.layer_norm(hidden, weight, bias, eps, normed)
    return normed


def product(steps: Any, matrix: PackedMatrix, x: Floats) -> Floats:
    """x W^T, a new array. matrix: [N, D]; x: [T, D] -> [T, N]."""
    out = np.empty((len(x), matrix.rows), np.float32)
    steps.linear(matrix, x, out)
    return out
