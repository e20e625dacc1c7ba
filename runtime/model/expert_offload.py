"""The interface of the model to an accelerator that computes some experts of a layer. `accelerator/` implements it.

Shapes: T tokens, D hidden, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class OffloadedLayer(Protocol):
    """One layer that the CPU and the accelerator compute at the same time.

    wanted: stored experts whose bytes are needed in host memory, in the order in which to request them.
    has_shared: whether the accelerator computes the shared expert.
    """

    wanted: list[int]
    has_shared: bool

    @property
    def comes_together(self) -> bool:
        """True if all experts may be taken at once."""
        ...

    def take(self, experts: Sequence[int]) -> list[int]:
        """Begin the copies among experts whose bytes are in host memory. Returns the experts that the CPU computes."""
        ...

    def finish(self, parts: np.ndarray) -> None:
        """Wait for the accelerator and write its results into `parts`, float32 [T, K, D]."""
        ...


class ExpertOffload(Protocol):
    """The experts of a bundle, some of them on an accelerator."""

    def absent(self, experts: Sequence[int]) -> list[int]:
        """Return the experts of a list that are not on the accelerator."""
        ...

    def begin(
        self, places_by_expert: dict[int, np.ndarray], hidden_states: np.ndarray, top_k: int, layer: int
    ) -> OffloadedLayer:
        """Plan a layer and start the experts that are on the accelerator.

        places_by_expert: for each stored expert its results, as token * top_k + rank, int [n].
        hidden_states: float32 [T, D].
        """
        ...
