"""The end of a search, kept for those of other devices. They share measurements, and differ in the cost of a byte.

The KL at which answers begin to lose more than a target belongs to the model, not to the device. So a later search
begins with a plan of that KL. The corrections of swaps belong to the model as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.manifests.files.limits import WORK_JSON
from moec.manifests.files.strict_json import load_strict_json

from ..request.targets import Target
from ..sensitivity.trials import Trials
from ..workspace.journal import Journal
from .bracket import choice_within, least_plan
from .loss_by_kl import MeasuredPlan, measured_plans
from .space import SearchSpace


@dataclass(frozen=True, slots=True)
class Boundary:
    """The end of a search, as far as it helps another one.

    kl: the KL at which the target is used up, nats per token.
    predicted: the predicted loss of the plan that it took. Predictions are equal for all devices.
    measured: plans whose answers were measured.
    factors: corrections by swaps, [num_factors].
    """

    kl: float
    predicted: float
    measured: Sequence[MeasuredPlan]
    factors: np.ndarray


class Boundaries:
    """The ends of the searches of several devices, in the journal that they share.

    is_first: whether the search is that of the first device, which begins alone.
    """

    def __init__(self, journal: Journal, is_first: bool) -> None:
        self._journal, self._is_first = journal, is_first

    def of_another(self, space: SearchSpace, target: Target) -> Boundary | None:
        """Return the end of the first search for this target with other costs; None if there is none."""
        digest = _costs_digest(space)
        for plain in [] if self._is_first else self._stored(target):
            factors = np.array(plain["factors"])
            if plain["costs"] != digest and factors.shape == (space.num_factors,):
                measured = measured_plans(plain["measured"])
                return Boundary(plain["kl"], plain["predicted"], measured, factors)
        return None

    def keep(self, space: SearchSpace, target: Target, ended: Boundary) -> None:
        """Store the end of a search, once for the same costs."""
        stored, digest = self._stored(target), _costs_digest(space)
        if any(plain["costs"] == digest for plain in stored):
            return
        plain = {
            "costs": digest,
            "kl": ended.kl,
            "predicted": ended.predicted,
            "measured": [plan.to_json() for plan in ended.measured],
            "factors": ended.factors.tolist(),
        }
        self._journal.json(_stage(target, len(stored)), lambda: plain)

    def _stored(self, target: Target) -> list[dict[str, Any]]:
        """Return the ends in order, up to the first that is missing or damaged."""
        stored = list[dict[str, Any]]()
        while (data := self._journal.get(_stage(target, len(stored)))) is not None:
            stored.append(load_strict_json(data, WORK_JSON))
        return stored


def _stage(target: Target, number: int) -> str:
    return f"search-end-{target.kind}-{target.value}-{number}"


def _costs_digest(space: SearchSpace) -> str:
    return hashlib.sha256(np.ascontiguousarray(space.table.costs).tobytes()).hexdigest()


def corrected_space(space: SearchSpace, trials: Trials, boundary: Boundary) -> SearchSpace:
    """Return the space with the corrections of the earlier search, or unchanged if its plan has less KL so."""
    plan, cost = least_plan(space, boundary.predicted)
    corrected = space.rescaled(boundary.factors)
    other = corrected.plan(choice_within(corrected.table, cost))
    plain, better = trials.kl_each([plan, other], ["search", "search"])
    return corrected if better.mean < plain.mean else space
