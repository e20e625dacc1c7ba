"""The plan of least cost within a measured KL, by bisection of the predicted loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moec.evaluation.statistics import DistributionSummary

from ..request.plan import CompilePlan
from ..sensitivity.trials import Trials
from .bracket import Bracket, Found, largest_budget, least_plan
from .space import SearchSpace

# A search ends between a kept and a refused plan once their costs are within this factor. The distance of their
# predicted losses then depends on the formats: 8 % at 2 bits per weight, 2 % at 1.25 bits per weight.
CLOSE_COSTS = 1.01
# A KL this factor below its limit needs no further measurement.
USED_UP = 1.08
Report = Callable[[CompilePlan, DistributionSummary, bool], None]


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
