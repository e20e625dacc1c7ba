"""Plans by predicted loss, a bracket of the cheapest plan that keeps a target, and the next budget to try."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moec.evaluation.statistics import LossEstimate

from ..request.plan import CompilePlan
from ..sensitivity.acceptance import margin
from ..sensitivity.trials import Trials
from .knapsack import ChoiceTable, least_cost, least_loss
from .space import SearchSpace

AIM = 0.93
"""Part of the target at which the next plan aims. A step that just misses the target costs a whole measurement."""
_SPREAD = 4.0
_STEP = 16.0


@dataclass(frozen=True, slots=True)
class Found:
    """An accepted plan.

    plan: the plan.
    predicted: its budget, as predicted loss.
    cost: its cost in the knapsack.
    """

    plan: CompilePlan
    predicted: float
    cost: float


@dataclass(slots=True)
class Bracket:
    """The largest budget whose plan keeps the target, and the least refused budget with its cost."""

    low: Found | None = None
    high: float = math.inf
    high_cost: float = 0.0

    def add(self, found: Found, is_kept: bool) -> None:
        if is_kept:
            self.low = found
        else:
            self.high, self.high_cost = found.predicted, found.cost

    def is_closed(self, close: float, most: float) -> bool:
        """Return whether costs are within a factor `close`, or no cheaper plan is left.

        most: the largest budget.
        """
        low = self.low
        return low is not None and (low.predicted >= most or low.cost <= self.high_cost * close)

    def next_budget(self, budget: float, ratio: float) -> float:
        """Return a secant step in log space inside the bracket, or a bisection if the step would leave it."""
        # Aim slightly below the target, because a step that just misses it costs a whole measurement.
        proposed = budget * float(np.clip(AIM * ratio, 1 / _SPREAD, _SPREAD))
        floor = self.low.predicted if self.low is not None else 0.0
        if floor * 1.02 < proposed < self.high / 1.02:
            return proposed
        if math.isinf(self.high):
            return floor * 2
        return math.sqrt(floor * self.high) if floor > 0 else self.high / _SPREAD


def choice_within(table: ChoiceTable, cost: float) -> np.ndarray:
    """Return the choice of least predicted loss within this cost. The cost must be reachable."""
    choice = least_loss(table, cost * (1 + 1e-9))  # margin for rounded sums
    if choice is None:
        raise RuntimeError("no plan costs as little as one that was found")
    return choice


def predicted_at(space: SearchSpace, cost: float) -> float:
    """Return the predicted loss of the best plan within a cost."""
    return space.table.totals(choice_within(space.table, cost))[1]


def headroom(losses: dict[str, LossEstimate], target: float, items: Mapping[str, int]) -> float:
    """Return the factor by which the budget may grow if loss were proportional to it.

    The task with the least room decides.
    """
    rooms = []
    for task, loss in losses.items():
        room = target - margin(loss, items[task])  # the part of the target that the acceptance rule leaves for the loss
        rooms.append(room / max(loss.loss, target / _SPREAD) if room > 0 else 1 / _SPREAD)
    return min(rooms)


def least_plan(space: SearchSpace, budget: float) -> tuple[CompilePlan, float]:
    """Return the plan of least cost within a predicted budget, and its cost."""
    choice = least_cost(space.table, budget)
    return space.plan(choice), space.table.totals(choice)[0]


def budget_of_kl(
    space: SearchSpace, trials: Trials, kl: float, budget: float, within: float, measurements: int
) -> tuple[float, float]:
    """Return a budget whose plan measures about a KL, and the last KL that was measured.

    budget: the first one that is tried.
    within: factor that ends the steps.
    measurements: most of them. After the last one the budget moves once more, unmeasured.
    """
    measured = 0.0
    for _ in range(measurements):
        measured = trials.kl(least_plan(space, budget)[0], "search").mean
        if kl / within <= measured <= kl * within:
            break
        budget *= float(np.clip(kl / max(measured, 1e-9), 1 / _STEP, _STEP))
    return budget, measured


def largest_budget(space: SearchSpace) -> float:
    """Return the predicted loss of the cheapest plan, plus a margin for rounded sums. No larger budget is useful."""
    return space.table.totals(least_cost(space.table, math.inf))[1] * (1 + 1e-9)
