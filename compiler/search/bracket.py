"""Plans by predicted loss, a bracket of the cheapest plan that keeps a target, and the next budget to try."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..request.plan import CompilePlan
from .knapsack import ChoiceTable, least_cost, least_loss
from .space import SearchSpace

AIM = 0.93
"""Part of the target at which the next plan aims. A step that just misses the target costs a whole measurement."""
_STEP = 16.0
"""Largest factor of one step. A KL is about proportional to its prediction."""


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
        proposed = budget * float(np.clip(AIM * ratio, 1 / _STEP, _STEP))
        floor = self.low.predicted if self.low is not None else 0.0
        if floor * 1.02 < proposed < self.high / 1.02:
            return proposed
        if math.isinf(self.high):
            return floor * 2
        return math.sqrt(floor * self.high) if floor > 0 else self.high / _STEP


def choice_within(table: ChoiceTable, cost: float) -> np.ndarray:
    """Return the choice of least predicted loss within this cost. The cost must be reachable."""
    choice = least_loss(table, cost * (1 + 1e-9))  # margin for rounded sums
    if choice is None:
        raise RuntimeError("no plan costs as little as one that was found")
    return choice


def predicted_at(space: SearchSpace, cost: float) -> float:
    """Return the predicted loss of the best plan within a cost."""
    return space.table.totals(choice_within(space.table, cost))[1]


def least_plan(space: SearchSpace, budget: float) -> tuple[CompilePlan, float]:
    """Return the plan of least cost within a predicted budget, and its cost."""
    choice = least_cost(space.table, budget)
    return space.plan(choice), space.table.totals(choice)[0]


def largest_budget(space: SearchSpace) -> float:
    """Return the predicted loss of the cheapest plan, plus a margin for rounded sums. No larger budget is useful."""
    return space.table.totals(least_cost(space.table, math.inf))[1] * (1 + 1e-9)
