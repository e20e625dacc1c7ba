"""What the model asks of an accelerator that computes some experts of a layer. `accelerator/` implements it.

Shapes: T tokens, D hidden, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class OffloadedLayer(Protocol):
    """One layer that the CPU and the accelerator compute together.

    wanted: stored experts that need their bytes in the host's memory, in the order in which to ask for them.
    has_shared: whether the accelerator computes the shared expert.
    """

    wanted: list[int]
    has_shared: bool

    @property
    def comes_together(self) -> bool:
        """Whether experts may be taken all at once."""
        ...

    def take(self, experts: Sequence[int]) -> list[int]:
        """Hand over experts whose bytes are in memory. Returns those that the CPU computes."""
        ...

    def finish(self, parts: np.ndarray) -> None:
        """Wait for the accelerator and write its results into `parts`, float32 [T, K, D]."""
        ...


class ExpertOffload(Protocol):
    """The experts of a bundle, some of them on an accelerator."""

    def absent(self, experts: Sequence[int]) -> list[int]:
        """Return those of some stored experts that are not on the accelerator."""
        ...

    def begin(self, asked: dict[int, np.ndarray], hidden_states: np.ndarray, top_k: int, layer: int) -> OffloadedLayer:
        """Plan a layer and start what is on the accelerator.

        asked: stored experts, each with its places (token x top_k + rank).
        hidden_states: float32 [T, D].
        """
        ...
