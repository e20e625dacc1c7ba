"""State of a pass while one of its layers runs, and the interface of lossy modes to a pass.

Shapes: T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..layers.routing import Routed, least_unimportance


class ExpertChoice(Protocol):
    """Changes that one pass makes to the choice of the routers. The lossy modes have one (`modes/expert_choice.py`)."""

    foretold: Mapping[int, np.ndarray] | None
    """Logits [T, E] by layer of the pass that these tokens are computed again after, or None."""

    @property
    def shared_parts(self) -> tuple[Any, ...]:
        """Modes, versions and cache, which all passes of an engine share."""
        ...

    @property
    def native_kind(self) -> str | None:
        """Name of this kind of pass for the extension, or None if it cannot decide as this choice does."""
        ...

    def take(self, layer: int, logits: np.ndarray) -> None:
        """Take the router logits [T, E] of a layer, if the choice records them."""
        ...

    def add_counts(self, counts: Sequence[int | float]) -> None:
        """Add the decisions that the extension made in a pass."""
        ...

    @property
    def reads_unimportance(self) -> bool:
        """True if the choice depends on the unimportance of experts."""
        ...

    def top_k(self, top_k: int) -> int:
        """Return the experts per token in a layer whose own number is top_k."""
        ...

    def select(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts to compute and their weights, both [T, K]. An expert may be NO_EXPERT."""
        ...

    def index(self, layer: int, expert: int) -> int:
        """Return the stored index of a chosen expert."""
        ...

    def requested(self, layer: int, experts: Sequence[int], advice: Sequence[int]) -> None:
        """Record the stored experts that a layer requests, and those that are read ahead after them."""
        ...

    def advised(self, layer: int, scores: np.ndarray, experts: Sequence[int], top_k: int) -> list[int]:
        """Return the stored experts to read ahead for a layer of a pass over one token.

        scores: [E].
        experts: the likeliest experts, best first.
        """
        ...

    def advised_to_many(self, layer: int, unimportance: np.ndarray | None, experts: Sequence[int]) -> list[int]:
        """Return the stored experts to read ahead for a layer of a pass over several tokens.

        unimportance: least unimportance of each expert, as foreseen, float32 [E]; None if it was not foreseen.
        experts: the likeliest experts, best first.
        """
        ...


@dataclass(slots=True)
class PassState:
    """State that a predictor may read while layer `layer` of a pass runs.

    hidden: residual stream at the router's input, float32 [T, D].

    chosen: experts of each layer that has run, as routed, int32 [T, K].
    tokens: int64 [T], None in the replay of a recorded pass.

    choice: how lossy modes change the routers' choice.
    sequences: number of sequences that the tokens belong to.

    logits: router logits of the running layer, float32 [T, E], None if it does not route.
    foreseen: scores [E] of the layers ahead that were predicted, nearest first.

    is_traced: whether a trace records the scores of the pass.
    weights: weights of the running layer's router, float32 [T, K], None if it does not route.
    unimportance_ahead: least unimportance [E] of the layers ahead that routers foresaw for several tokens, by distance.
    """

    layer: int
    hidden: np.ndarray
    chosen: list[np.ndarray]
    tokens: np.ndarray | None = None
    choice: ExpertChoice | None = None
    sequences: int = 1
    logits: np.ndarray | None = None
    foreseen: list[np.ndarray] = field(default_factory=list)
    is_traced: bool = False
    weights: np.ndarray | None = None
    unimportance_ahead: dict[int, np.ndarray] = field(default_factory=dict)

    def top_k(self, top_k: int) -> int:
        """Return this pass's experts per token in a layer whose own number is top_k."""
        return top_k if self.choice is None else self.choice.top_k(top_k)

    def unimportance(self) -> list[np.ndarray]:
        """Return the least unimportance of experts in a pass over several tokens, float32 [E] each.

        The running layer comes first, then those ahead that were foreseen, nearest first. It is empty for one token.
        """
        if len(self.hidden) == 1 or self.logits is None or self.weights is None:
            return []
        least = least_unimportance(self.chosen[self.layer], self.weights, self.logits.shape[1])
        return [least, *self.unimportance_ahead.values()]

    @property
    def asks_for_unimportance(self) -> bool:
        """True if a lossy mode or a trace reads the unimportance that several tokens give experts ahead."""
        is_read = self.choice is not None and self.choice.reads_unimportance
        return len(self.hidden) > 1 and (is_read or self.is_traced)
