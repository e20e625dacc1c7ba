"""The ends of attention or of a recurrent layer at the residual stream: the norm before, the scaled sum after it.

Shape letters: T tokens, N rows, D hidden, S slots, C context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .packed_matrix import Floats, Int32s, PackedMatrix


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Slots and positions of the T tokens of a pass.

    slots: int32 [T], below S.
    positions: int32 [T], below C.
    ends: for an encoder, end of each token's sequence, int32 [T], 1 to C. A token sees positions 0 to end - 1.
    None: a token sees the positions up to its own.
    """

    slots: Int32s
    positions: Int32s
    ends: Int32s | None = None


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The rule that turns products of queries and keys into weights of positions.

    scale: factor of every score.
    window: 0 for none, else its size. A token at position p sees positions max(0, p - window + 1) to p.
    It must be 0 if the tokens have `ends`.
    sinks: float32 [H], an additional score of each head. It takes a share of the softmax and adds no value.
    bias: float32 [H, 2 C - 1]. For a token at position p, the entry C - 1 + j - p is added to the scaled score of
    position j.
    """

    scale: float
    window: int = 0
    sinks: Floats | None = None
    bias: Floats | None = None


@dataclass(kw_only=True)
class StreamLayer:
    """A layer that combines tokens, from the residual stream back to the residual stream. Subclasses combine them.

    norm: weight of the norm before it, float32 [D].
    norm_eps: its epsilon.
    norm_bias: float32 [D]: the norm is a layer norm. None: it is an RMS norm.
    after_norm: weight of an RMS norm of the result, float32 [D], or None.
    residual_scale: factor of the result.
    """

    norm: Floats
    norm_eps: float
    norm_bias: Floats | None = None
    after_norm: Floats | None = None
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        """Make the form that other kernels keep; numpy needs none."""

    def mix_in_steps(self, steps: Any, hidden: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> None:
        """Compute `kernels.attend` or `kernels.mix` by single operations.

        steps: the module with the operations, `reference` or `kernels`.
        state: keys and values, or the arrays of a recurrent state.
        """
        normed = norm_stream(steps, hidden, self.norm, self.norm_bias, self.norm_eps)
        added = self._mix(steps, normed, state, places)
        if self.after_norm is not None:
            steps.rms_norm(added, self.after_norm, self.norm_eps, added)
        added *= np.float32(self.residual_scale)
        hidden += added

    def _mix(self, steps: Any, normed: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> Floats:
        """Return the layer's output for the normed stream, [T, D] -> [T, D], a new array. Writes to its state."""
        raise NotImplementedError


def norm_stream(steps: Any, hidden: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """Apply an RMS norm to the residual stream, or a layer norm if there is a bias. [T, D] -> [T, D], a new array."""
    normed = np.empty_like(hidden)
    if bias is None:
        steps.rms_norm(hidden, weight, eps, normed)
    else:
        steps.layer_norm(hidden, weight, bias, eps, normed)
    return normed


def product(steps: Any, matrix: PackedMatrix, x: Floats) -> Floats:
    """Return x W^T, a new array. matrix: [N, D]; x: [T, D] -> [T, N]."""
    out = np.empty((len(x), matrix.rows), np.float32)
    steps.linear(matrix, x, out)
    return out
