"""Evaluate the routers of several layers at once, for one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import kernels
from .norms import Norm
from .routing import Router


@dataclass(frozen=True, slots=True)
class RouterStack:
    """Softmax routers of E experts each, each after the RMS norm of its own layer.

    HOBBIT uses one input for all, which leaves out the norms of the layers ahead.
    Source: HOBBIT, layer-level prediction, stacked gating.
    """

    matrices: list[kernels.PackedMatrix]
    norms: list[np.ndarray]
    biases: list[np.ndarray | None]
    eps: float

    def shares(self, hidden: np.ndarray) -> np.ndarray:
        """Return the softmax share of each expert. float32 [1, D] -> [M, E]."""
        out = np.empty((len(self.matrices), self.matrices[0].rows), np.float32)
        kernels.router_shares(self.matrices, self.norms, self.eps, hidden, out, self.biases)
        return out


def stack_routers(routers: Sequence[Router], norms: Sequence[Norm]) -> RouterStack | None:
    """Combine routers with the norms before them. Returns None unless all are plain softmax routers of one size."""
    matrices = [matrix for router in routers if (matrix := router.matrix) is not None]
    is_plain = all(router.rule.is_softmax for router in routers)
    is_plain = is_plain and all(norm.bias is None and norm.eps == norms[0].eps for norm in norms)
    if not is_plain or not matrices or len(matrices) < len(routers) or len({stored.rows for stored in matrices}) > 1:
        return None
    biases = [router.bias_among_kept for router in routers]
    return RouterStack(matrices, [norm.weight for norm in norms], biases, norms[0].eps)
