"""The plan of least cost within a measured KL, by bisection of the predicted loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moec.evaluation.statistics import DistributionSummary
from moec.manifests.errors import TargetUnreachable

from ..request.plan import CompilePlan
from ..sensitivity.trials import Trials
from .knapsack import ChoiceTable, least_cost, least_loss
from .space import SearchSpace

AIM = 0.96
"""Part of the target at which the next plan aims: the middle of the values that end a bisection."""
_STEP = 16.0
"""Largest factor of one step."""
_EXPONENTS = (0.4, 1.6)
"""Least and largest power of its prediction with which a KL is believed to rise. Measured: 0.65 to 1.0."""
_SHORT_STEP = 0.05
"""Step in log budget at which the KL of two plans and what was believed before count equally. Plans of nearly equal
budgets differ by noise."""
_NEAR = 1.005
"""Factor between budgets below which their plans are hardly different."""
_LEAST = 1e-12
# A search ends between a kept and a refused plan once their costs are within this factor. The distance of their
# predicted losses then depends on the formats: 8 % at 2 bits per weight, 2 % at 1.25 bits per weight.
CLOSE_COSTS = 1.01
# A KL this factor below its limit needs no further measurement.
USED_UP = 1.08
Report = Callable[[CompilePlan, DistributionSummary, bool], None]


@dataclass(frozen=True, slots=True)
class Found:
    """An accepted plan.

    predicted: its budget, as predicted loss.
    cost: its cost in the knapsack.
    exponent: power of the predicted loss with which the KL rose near this plan.
    """

    plan: CompilePlan
    predicted: float
    cost: float
    exponent: float = 1.0


@dataclass(slots=True)
class Bracket:
    """The largest budget whose plan keeps the target, and the least refused budget with its cost.

    exponent: power of the predicted loss with which the measured value rises, corrected with each measurement.
    """

    exponent: float = 1.0
    low: Found | None = None
    high: float = math.inf
    high_cost: float = 0.0
    _last: tuple[float, float] | None = None

    def add(self, tried: Found, value: float, is_kept: bool) -> None:
        """Take a measured plan into account.

        value: its measured value.
        """
        point = math.log(max(tried.predicted, _LEAST)), math.log(max(value, _LEAST))
        if self._last is not None:
            step, rise = point[0] - self._last[0], point[1] - self._last[1]
            prior = _SHORT_STEP**2
            measured = (step * rise + prior * self.exponent) / (step**2 + prior)
            self.exponent = float(np.clip(measured, *_EXPONENTS))
        self._last = point
        if is_kept:
            self.low = tried
        else:
            self.high, self.high_cost = tried.predicted, tried.cost

    def is_closed(self, close: float, most: float) -> bool:
        """Return whether costs are within a factor `close`, or no cheaper plan is left.

        most: the largest budget.
        """
        low = self.low
        return low is not None and (low.predicted >= most or low.cost <= self.high_cost * close)

    def next_budget(self, budget: float, ratio: float) -> float:
        """Return a secant step in log space inside the bracket, or a bisection if the step would leave it.

        ratio: target over the value that was measured at this budget.
        """
        step = (AIM * ratio) ** (1 / self.exponent)
        proposed = budget * float(np.clip(step, 1 / _STEP, _STEP))
        floor = self.low.predicted if self.low is not None else 0.0
        if floor * _NEAR < proposed < self.high / _NEAR:
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


def most_precise(space: SearchSpace, judged: Callable[[CompilePlan], tuple[bool, str]], wanted: str) -> Found:
    """Return the least lossy plan, if it keeps the target.

    judged: returns whether a plan keeps the target, and its measurement as text.
    wanted: the target as text.
    Raises TargetUnreachable otherwise.
    """
    plan, cost = least_plan(space, 0.0)
    accepted, measured = judged(plan)
    if not accepted:
        raise TargetUnreachable(
            f"no plan on offer keeps {wanted}; the most precise one, {plan.bits_per_weight:.2f} bits per weight, "
            f"{measured}",
            "allow more loss, or offer more bits with `--bits` and `--dense-bits`",
        )
    return Found(plan, 0.0, cost)


@dataclass(frozen=True, slots=True)
class KlLimit:
    """A limit on the KL of plans.

    value: the limit, nats per token.
    measured: the value of a measurement that the limit is about: its mean, or its upper bound.
    measurements: most measurements of one bisection.
    """

    value: float
    measured: Callable[[DistributionSummary], float]
    measurements: int


def least_within(
    space: SearchSpace,
    trials: Trials,
    limit: KlLimit,
    budget: float,
    report: Report = lambda plan, summary, is_kept: None,
    exponent: float = 1.0,
) -> Found | None:
    """Return the plan of least cost whose KL is within the limit, or None if no measured plan is.

    budget: predicted loss of the first plan.
    report: called with each plan, its KL, and whether the limit keeps it.
    exponent: power of the predicted loss with which the KL is expected to rise.
    """
    bracket, most = Bracket(exponent), largest_budget(space)
    for _ in range(limit.measurements):
        budget = min(budget, most)
        plan, cost = least_plan(space, budget)
        summary = trials.kl(plan, "search")
        value = limit.measured(summary)
        is_kept = value <= limit.value
        report(plan, summary, is_kept)
        bracket.add(Found(plan, budget, cost), value, is_kept)
        if limit.value / USED_UP <= value <= limit.value or bracket.is_closed(CLOSE_COSTS, most):
            break
        budget = bracket.next_budget(budget, limit.value / max(value, 1e-12))
    return None if bracket.low is None else replace(bracket.low, exponent=bracket.exponent)
