"""The end of a search, kept for those of other devices. They share measurements, and differ in the cost of a byte.

The KL at which answers begin to lose more than a target belongs to the model, not to the device. So a later search
begins with a plan of that KL. The corrections of swaps belong to the model as well.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.manifests.files.limits import WORK_JSON
from moec.manifests.files.strict_json import load_strict_json

from ..request.targets import Target
from ..sensitivity.trials import Trials
from ..workspace.journal import Journal
from .bracket import Found, budget_of_kl, choice_within, least_plan
from .space import SearchSpace

CLOSE_KL = 1.05
"""Factor within which the first plan of a later search has the KL of the earlier one."""
_FIRST_KL = 3
"""Most steps that look for this plan. Each measures a KL, and one more is measured if none is close."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a search.

    found: the plan that it took.
    refused: plans that did not keep the target.
    factors: corrections by swaps, [num_factors].
    """

    found: Found
    refused: Sequence[Found]
    factors: np.ndarray


@dataclass(frozen=True, slots=True)
class Boundary:
    """The knowledge of an earlier search.

    kept_kl: KL of the plan that it took.
    predicted: the predicted loss of that plan. Predictions are equal for all devices.
    refused_kl: KL of the refused plan with the highest cost; infinite if none was refused, or at a lower KL.
    factors: corrections by swaps, [num_factors].
    """

    kept_kl: float
    predicted: float
    refused_kl: float
    factors: np.ndarray


class Boundaries:
    """The ends of the searches of several devices, in the journal that they share.

    is_first: whether the search is that of the first device, which begins alone.
    """

    def __init__(self, journal: Journal, is_first: bool) -> None:
        self._journal, self._is_first = journal, is_first

    def of_another(self, space: SearchSpace, target: Target) -> Boundary | None:
        """Return the end of the first search for this target with other costs; None if there is none."""
        own = _costs_digest(space)
        for plain in [] if self._is_first else self._stored(target):
            factors = np.array(plain["factors"])
            if plain["costs"] != own and factors.shape == (space.num_factors,):
                refused = math.inf if plain["refused_kl"] is None else plain["refused_kl"]
                return Boundary(plain["kept_kl"], plain["predicted"], refused, factors)
        return None

    def keep(self, space: SearchSpace, target: Target, trials: Trials, ended: Ended) -> None:
        """Store the end of a search, once for the same costs. A run that is resumed measures the same plans again."""
        stored, own = self._stored(target), _costs_digest(space)
        kept = trials.kl(ended.found.plan, "search").mean
        refused = None
        if ended.refused:
            nearest = max(ended.refused, key=lambda found: found.cost)
            refused = trials.kl(nearest.plan, "search").mean
        if any(plain["costs"] == own for plain in stored):
            return
        above = refused if refused is not None and refused > kept else None
        plain = {
            "costs": own,
            "kept_kl": kept,
            "predicted": ended.found.predicted,
            "refused_kl": above,
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
    return f"search-{target.kind}-{target.value}-{number}"


def _costs_digest(space: SearchSpace) -> str:
    return hashlib.sha256(np.ascontiguousarray(space.table.costs).tobytes()).hexdigest()


def corrected_space(space: SearchSpace, trials: Trials, boundary: Boundary) -> SearchSpace:
    """Return the space with the corrections of the earlier search, or unchanged if its plan has less KL so."""
    plan, cost = least_plan(space, boundary.predicted)
    corrected = space.rescaled(boundary.factors)
    other = corrected.plan(choice_within(corrected.table, cost))
    plain, better = trials.kl_each([plan, other], ["search", "search"])
    return corrected if better.mean < plain.mean else space


def budget_at(space: SearchSpace, trials: Trials, boundary: Boundary) -> tuple[float, float]:
    """Return a predicted budget whose plan measures about the KL of the earlier one, and the KL that it measures."""
    kl = boundary.kept_kl
    budget, measured = budget_of_kl(space, trials, kl, boundary.predicted, CLOSE_KL, _FIRST_KL)
    if not kl / CLOSE_KL <= measured <= kl * CLOSE_KL:
        measured = trials.kl(least_plan(space, budget)[0], "search").mean
    return budget, measured
