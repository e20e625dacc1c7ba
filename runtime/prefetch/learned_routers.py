"""Routers that a compile learned to foresee later layers, and the record of a pass from which it learns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.bundle import BundleManifest

from .. import kernels
from ..bundle.lookahead import MAX_AHEAD, ForeseeingMatrix
from ..layers.norms import Norm
from ..layers.routing import Router
from .advisor import Advisor
from .pass_state import PassState
from .predictors import Predictor

LearnedRouters = dict[tuple[int, int], Router]
"""Routers by running layer and distance. Each reads the stream through the norm of the running layer."""


def learned_routers(
    manifest: BundleManifest, matrices: Mapping[tuple[int, int], ForeseeingMatrix], advisor: Advisor
) -> LearnedRouters:
    """Return the matrices as routers of the layers that they foresee.

    advisor: its options decide which layers a run looks at. Matrices of others are left out.
    """
    model = manifest.model
    return {
        (layer, ahead): Router(
            model.layers[layer + ahead].experts,
            kernels.PackedMatrix(matrix.data, len(matrix.bias), model.hidden_size, matrix.spec),
            matrix.bias,
            manifest.pruned_experts[layer + ahead],
        )
        for (layer, ahead), matrix in matrices.items()
        if any(later.ahead == ahead for later in advisor.layers_ahead(layer))
    }


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """The routing of the tokens of a pass in one layer, T tokens.

    inputs: what the router reads, float32 [T, D].
    logits: float32 [T, E].
    chosen: int32 [T, K].
    foreseen: logits that the routers of later layers give for this layer's stream, [T, E], by distance.
    """

    inputs: np.ndarray
    logits: np.ndarray
    chosen: np.ndarray
    foreseen: dict[int, np.ndarray]


@dataclass(slots=True)
class RouterRecorder(Predictor):
    """Records the routing of every layer of a pass, and predicts nothing."""

    norms: Sequence[Norm]
    routers: Sequence[Router | None]
    layers: dict[int, RecordedRouting] = field(default_factory=dict)

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        return self.scores_ahead(state, [ahead])[0]

    def scores_ahead(self, state: PassState, aheads: Sequence[int]) -> list[np.ndarray | None]:
        if state.logits is not None:
            foreseen = {
                ahead: router.logits(self.norms[state.layer + ahead](state.hidden))
                for ahead in range(1, MAX_AHEAD + 1)
                if state.layer + ahead < len(self.routers) and (router := self.routers[state.layer + ahead]) is not None
            }
            inputs, chosen = self.norms[state.layer](state.hidden), state.chosen[state.layer]
            self.layers[state.layer] = RecordedRouting(inputs, state.logits.copy(), chosen.copy(), foreseen)
        return [None] * len(aheads)


@contextmanager
def recorded_routers(
    advisor: Advisor, norms: Sequence[Norm], routers: Sequence[Router | None]
) -> Iterator[RouterRecorder]:
    """Record every pass of several tokens in a `with` block. Nothing is read ahead meanwhile."""
    before = advisor.predictor, advisor.rule
    recorder = RouterRecorder(norms, routers)
    advisor.predictor, advisor.rule = recorder, "until-routed"  # the rule that asks about every layer
    try:
        yield recorder
    finally:
        advisor.predictor, advisor.rule = before
