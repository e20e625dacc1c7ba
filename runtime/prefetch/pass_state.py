"""What is known while a layer of a pass runs, and what lossy modes are asked about it.

Shapes: T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..layers.routing import Routed


class ExpertChoice(Protocol):
    """How one pass changes the choice of the routers. `modes/choice.py` implements it for the lossy modes."""

    def top_k(self, top_k: int) -> int:
        """Return the experts per token in a layer that has so many."""
        ...

    def select(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts to compute and their weights, both [T, K]. An expert may be NO_EXPERT."""
        ...

    def index(self, layer: int, expert: int) -> int:
        """Return the stored index of a chosen expert."""
        ...

    def requested(self, layer: int, experts: Sequence[int], advice: Sequence[int]) -> None:
        """Note the stored experts that a layer asks for, and those that are read ahead after them."""
        ...

    def advised(self, layer: int, scores: np.ndarray, experts: Sequence[int], top_k: int) -> list[int]:
        """Return the stored experts to read ahead for a layer. scores: [E]; experts: the likeliest, best first."""
        ...


@dataclass(slots=True)
class PassState:
    """What a predictor may look at while layer `layer` of a pass runs.

    hidden: [T, D] residual stream at the router's input; chosen: experts int32 [T, K] per layer run so far, as routed.
    tokens: int64 [T], None where a recorded pass is replayed. choice: how lossy modes change the routers' choice.
    sequences: how many the tokens belong to.
    logits: float32 [T, E], of the running layer, None where it routes nothing. foreseen: of the layers ahead that were
    asked, the scores [E], nearest first.
    """

    layer: int
    hidden: np.ndarray
    chosen: list[np.ndarray]
    tokens: np.ndarray | None = None
    choice: ExpertChoice | None = None
    sequences: int = 1
    logits: np.ndarray | None = None
    foreseen: list[np.ndarray] = field(default_factory=list)

    def top_k(self, top_k: int) -> int:
        """Experts per token of this pass in a layer of so many."""
        return top_k if self.choice is None else self.choice.top_k(top_k)
