"""The search: predictions propose, measurements decide.

A plan for a predicted loss comes from the knapsack in milliseconds. What it really costs is measured, and the budget
moves until the measured value meets the target: at most MAX_GENERATED measurements on generated answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moec.evaluation.statistics import LossEstimate
from moec.manifests.errors import TargetUnreachable

from ..plan import CompilePlan
from ..targets import Target
from ..trials import Trials, kl_bound, margin
from .frontier import least_cost, least_loss
from .space import SearchSpace

MAX_GENERATED = 8
MAX_KL = 8
# Cheap measurements before the first on generated answers, and how near to the KL they bring it, as a factor.
CALIBRATING_KL, CALIBRATED = 4, 1.5
# The search ends between a plan that keeps the target and one that does not, where their costs are this near; how far
# their predicted losses then lie apart depends on the formats: 8 % at 2 bits per weight, 2 % at 1.25.
CLOSE_COSTS = 1.01
# A KL this near to the target, as a factor, is not worth another measurement.
CLOSE_KL = 1.08
_SPREAD = 4.0
AIM = 0.93
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """An accepted plan; predicted: its budget in the knapsack's units; cost: what it costs there."""

    plan: CompilePlan
    predicted: float
    cost: float


def search(space: SearchSpace, trials: Trials, target: Target, note: Note) -> CompilePlan:
    """The plan of least cost that keeps the target. Raises TargetUnreachable with the best that can be had."""
    if target.kind == "loss":
        return _search_loss(space, trials, target.value, note).plan
    if target.kind == "kl":
        return _search_kl(space, trials, target.value, note).plan
    weights = space.plain.expert_weights
    budget = target.value if target.kind == "size" else target.value * weights / 8
    table = space.size_table()
    choice = least_loss(table, budget)
    if choice is None:
        least = float(np.min(table.costs, axis=1).sum())
        raise TargetUnreachable(
            f"{target} is below the smallest plan on offer: {least:.0f} bytes, "
            f"{8 * least / weights:.3f} bits per weight",
            "ask for more, or offer smaller formats with `--bits` and `--group-size`",
        )
    plan = space.plan(choice)
    if trials.has_data:
        trials.kl(plan, "search")
    return plan


def _search_kl(space: SearchSpace, trials: Trials, target: float, note: Note) -> Found:
    """Largest predicted budget whose plan measures a KL of at most the target, as `kl_bound` tells it."""
    low: Found | None = None
    high, high_cost = math.inf, 0.0
    most = _largest_budget(space)
    budget = target
    for _ in range(MAX_KL):
        budget = min(budget, most)
        plan, cost = _least_plan(space, budget)
        measured = kl_bound(trials.kl(plan, "search"))
        note(f"KL up to {measured:.4f} at {plan.bits_per_weight:.3f} bits per weight")
        if measured <= target:
            low = Found(plan, budget, cost)
            if measured >= target / CLOSE_KL or budget >= most:
                break
        else:
            high, high_cost = budget, cost
        if low is not None and low.cost <= high_cost * CLOSE_COSTS:
            break
        budget = _next_budget(budget, low, high, target / max(measured, 1e-12))
    if low is None:
        low = _most_precise(space, lambda plan: _kl_verdict(trials, plan, target), f"KL {target:g} nats per token")
    return low


def _kl_verdict(trials: Trials, plan: CompilePlan, target: float) -> tuple[bool, str]:
    summary = trials.kl(plan, "most precise")
    return kl_bound(summary) <= target, f"has KL {summary.mean:.4g}"


def _next_budget(budget: float, low: Found | None, high: float, ratio: float) -> float:
    """Secant step in log space, kept inside the bracket; bisection where it would leave it."""
    # Aimed a little inside the target: a step that falls just short of it costs a whole measurement.
    proposed = budget * float(np.clip(AIM * ratio, 1 / _SPREAD, _SPREAD))
    floor = low.predicted if low is not None else 0.0
    if floor * 1.02 < proposed < high / 1.02:
        return proposed
    if math.isinf(high):
        return floor * 2
    return math.sqrt(floor * high) if floor > 0 else high / _SPREAD


def _search_loss(space: SearchSpace, trials: Trials, target: float, note: Note) -> Found:
    """Largest predicted budget whose generated answers keep the target, as `trials.keeps` judges."""
    low: Found | None = None
    high, high_cost = math.inf, 0.0
    most = _largest_budget(space)
    budget = _calibrated_budget(space, trials, trials.first_kl_per_loss * target)
    for _ in range(MAX_GENERATED):
        budget = min(budget, most)
        plan, cost = _least_plan(space, budget)
        accepted, losses = trials.accepts(plan, target, "search")
        note(_sentence(plan, losses, accepted))
        if accepted:
            low = Found(plan, budget, cost)
        else:
            high, high_cost = budget, cost
        if low is not None and (low.predicted >= most or low.cost <= high_cost * CLOSE_COSTS):
            break
        budget = _next_budget(budget, low, high, _headroom(losses, target, trials.certification_items))
    if low is None:
        low = _most_precise(space, lambda plan: _loss_verdict(trials, plan, target), f"a loss of {target:.2%}")
    return low


def _loss_verdict(trials: Trials, plan: CompilePlan, target: float) -> tuple[bool, str]:
    accepted, losses = trials.accepts(plan, target, "most precise")
    return accepted, f"measures {_losses_text(losses)}"


def _headroom(losses: dict[str, LossEstimate], target: float, items: Mapping[str, int]) -> float:
    """By how much the budget may grow if the loss were proportional to it; the task with the least room speaks."""
    rooms = []
    for task, loss in losses.items():
        room = target - margin(loss, items[task])  # what the acceptance rule leaves for the loss itself
        rooms.append(room / max(loss.loss, target / _SPREAD) if room > 0 else 1 / _SPREAD)
    return min(rooms)


def _least_plan(space: SearchSpace, budget: float) -> tuple[CompilePlan, float]:
    """The plan of least cost within a predicted budget, and that cost."""
    choice = least_cost(space.table, budget)
    return space.plan(choice), space.table.totals(choice)[0]


def _largest_budget(space: SearchSpace) -> float:
    """The predicted loss of the cheapest plan, past which nothing changes; a little more, since sums are rounded."""
    return space.table.totals(least_cost(space.table, math.inf))[1] * (1 + 1e-9)


def _calibrated_budget(space: SearchSpace, trials: Trials, kl: float) -> float:
    """The predicted budget whose plan measures about this KL, by a few cheap measurements."""
    budget = kl
    for _ in range(CALIBRATING_KL):
        measured = trials.kl(_least_plan(space, budget)[0], "search").mean
        if kl / CALIBRATED <= measured <= kl * CALIBRATED:
            break
        budget *= float(np.clip(kl / max(measured, 1e-9), 1 / 16, 16))
    return budget


def _most_precise(space: SearchSpace, judged: Callable[[CompilePlan], tuple[bool, str]], wanted: str) -> Found:
    """The least lossy plan, if it keeps what is wanted; `judged` says so and what it measured."""
    plan, cost = _least_plan(space, 0.0)
    accepted, measured = judged(plan)
    if not accepted:
        raise TargetUnreachable(
            f"no plan on offer keeps {wanted}; the most precise one, {plan.bits_per_weight:.2f} bits per weight, "
            f"{measured}",
            "allow more loss, or offer more bits with `--bits` and `--dense-bits`",
        )
    return Found(plan, 0.0, cost)


def _sentence(plan: CompilePlan, losses: dict[str, LossEstimate], accepted: bool) -> str:
    verdict = "kept" if accepted else "too much"
    return f"{plan.bits_per_weight:.3f} bits per weight: {_losses_text(losses)}: {verdict}"


def _losses_text(losses: dict[str, LossEstimate]) -> str:
    parts = (f"{task} {loss.loss:.2%} +- {loss.standard_error:.2%} (n {loss.n})" for task, loss in losses.items())
    return f"loss {', '.join(parts)}"
