"""Operations of looking ahead in numpy. They specify the extension's functions of the same names.

Shape letters: M routers, E experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .packed_matrix import Floats, PackedMatrix, check_array, check_shape, require
from .reference import linear, rms_norm


def router_shares(
    matrices: Sequence[PackedMatrix],
    norms: Sequence[Floats],
    eps: float,
    x: Floats,
    out: Floats,
    biases: Sequence[Floats | None] = (),
) -> None:
    """Compute the expert shares of several routers for one token.

    out[i] = softmax(rms_norm(x, norms[i], eps) W_i^T + biases[i]).
    matrices: M of 1 to 8, [E, D] each.
    norms: M, [D] each.
    x: [1, D].
    out: [M, E], written.
    biases: empty, or M, each [E] or None.
    Raises ValueError.
    """
    require(0 < len(matrices) <= 8 and len(norms) == len(matrices), "matrices: expected 1 to 8 and as many norms")
    require(len(biases) in (0, len(matrices)), "biases: expected none, or one for each matrix")
    check_array(x, "x", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    for at, (matrix, norm) in enumerate(zip(matrices, norms, strict=True)):
        check_shape(x, "x", (1, matrix.columns))
        check_shape(out, "out", (len(matrices), matrix.rows))
        normed, bias = np.empty_like(x), biases[at] if biases else None
        rms_norm(x, norm, eps, normed)
        linear(matrix, normed, out[at : at + 1])
        if bias is not None:
            check_array(bias, "biases", np.float32, 1)
            check_shape(bias, "biases", (matrix.rows,))
            out[at] += bias
    out -= out.max(axis=1, keepdims=True)
    np.exp(out, out=out)
    out /= out.sum(axis=1, keepdims=True)


def largest(values: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    """Return the indices of the `count` largest values, and these values, largest first.

    Of equal values the lowest index comes first; NaN comes last.
    values: floats [n].
    """
    order = np.argsort(-values, kind="stable")[:count]
    return order.tolist(), values[order].tolist()
