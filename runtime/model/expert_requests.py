"""The stored experts that a layer needs, and the interface to an accelerator that computes some of them.

The experts are the router's choice, after the changes of lossy modes. The model and the replays of its traces call
`choose_experts`, so that both decide in the same way. `accelerator/` implements the interface.
Shapes: T tokens, D hidden, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np

from moec.manifests.model import ExpertsSpec

from ..layers.routing import NO_EXPERT, Routed, RoutingRule, within_capacity
from ..prefetch.pass_state import PassState


def choose_experts(
    state: PassState,
    experts: ExpertsSpec,
    first_expert: int,
    rule: RoutingRule,
    logits: np.ndarray,
    slots: np.ndarray | None = None,
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Choose the stored experts that the running layer needs. Stores the router's own choice in `state`.

    Returns two values:
    1. For each stored expert the outputs that it computes, as token * top_k + rank, int [n].
    2. The weight of each output, float32 [T, K].

    experts: experts of the layer.
    first_expert: index of its first expert among those of all layers.
    rule: rule of its router.

    logits: output of its router, float32 [T, E].
    slots: int32 [T]; needed if the layer has a capacity.
    """
    choice = state.choice
    chosen, weights = rule.route(logits, state.tokens, state.top_k(experts.top_k))
    state.chosen.append(chosen)
    state.logits, state.weights = logits, weights
    if choice is not None:
        chosen, weights = choice.select(Routed(state.layer, rule, logits, chosen, weights))
    if experts.router.capacity and slots is not None:
        chosen = np.where(within_capacity(chosen, slots, experts.router.capacity), chosen, np.int32(NO_EXPERT))
    groups = _places_by_expert(chosen)
    groups.pop(NO_EXPERT, None)
    if choice is None:
        return {first_expert + expert: places for expert, places in groups.items()}, weights
    return {choice.index(state.layer, expert): places for expert, places in groups.items()}, weights


@cache
def _single_places(count: int) -> tuple[np.ndarray, ...]:
    """Return the numbers 0 to count - 1 as single arrays, int32 [1], read-only."""
    places = np.arange(count, dtype=np.int32)
    places.flags.writeable = False
    return tuple(places[at : at + 1] for at in range(count))


def _places_by_expert(chosen: np.ndarray) -> dict[int, np.ndarray]:
    """Return for each expert the places that chose it, token * top_k + rank, ascending.

    chosen: int32 [T, K].
    """
    flat = chosen.reshape(-1)
    if len(chosen) == 1 or not len(flat):  # no expert twice: decoding need not sort
        return dict(zip(flat.tolist(), _single_places(len(flat)), strict=True))
    order = np.argsort(flat, kind="stable")
    unique, starts = np.unique(flat[order], return_index=True)
    return dict(zip(unique.tolist(), np.split(order, starts[1:]), strict=True))


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
