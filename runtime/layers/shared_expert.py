"""The shared expert of a layer, which every token uses.

It is resident with the dense weights, and is one more rank after the routed experts.
A layer without routed experts uses it as its feed-forward.
Shapes: T tokens, K ranks, the shared expert last, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import kernels
from ..kernels.elementary import sigmoid


class SharedExpert:
    """One shared expert. If it has a router of its own, the sigmoid of its logit weighs the output."""

    def __init__(self, weights: Mapping[str, Any], activation: str) -> None:
        """Create the expert.

        weights: `shared_gate`, `shared_up`, `shared_down`, and `shared_router` if there is one.
        activation: as in kernels.Expert; `relu` has no gate.
        """
        gate, up, down = weights.get("shared_gate"), weights["shared_up"], weights["shared_down"]
        self.expert = kernels.Expert(gate=gate, up=up, down=down, activation=activation)
        self.router = weights.get("shared_router")

    def weights(self, normed: np.ndarray) -> np.ndarray:
        """Return the weight of its output for each token, [T, 1]."""
        if self.router is None:
            return np.ones((len(normed), 1), np.float32)
        logits = np.empty((len(normed), 1), np.float32)
        kernels.linear(self.router, normed, logits)
        return sigmoid(logits)

    def __call__(self, normed: np.ndarray, parts: np.ndarray) -> None:
        """Compute all tokens [T, D] into the last rank of parts, [T, K, D]."""
        tokens = np.arange(len(normed), dtype=np.int32)
        kernels.expert_ffn(self.expert, normed, tokens, np.full_like(tokens, parts.shape[1] - 1), parts)
