"""The search: predictions propose plans, measurements decide.

The knapsack gives a plan for a predicted loss in milliseconds. Its real loss is measured. The budget moves until the
measured value meets the target, with at most MAX_GENERATED measurements on generated answers.
In between, cheap measurements of plans at equal cost correct the predictions (swaps.py). One more measurement on
answers judges the plan that swaps derive from the accepted plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.evaluation.divergence import divergence_bound
from moec.evaluation.statistics import DistributionSummary, LossEstimate
from moec.manifests.errors import TargetUnreachable

from ..request.plan import CompilePlan
from ..request.targets import Target
from ..sensitivity.acceptance import items_for_precision, margin, upper_bound
from ..sensitivity.trials import Trials
from .knapsack import ChoiceTable, least_cost, least_loss
from .space import SearchSpace
from .swaps import NO_SWAPS, Swaps

MAX_GENERATED = 8
# Part of MAX_GENERATED, reserved for plans after swaps. More would bisect below the resolution of the losses.
AFTER_SWAPS = 2
MAX_KL = 8
# Maximum of cheap KL measurements before the first one on answers. They end once the KL is within this factor.
CALIBRATING_KL, CALIBRATED = 4, 1.5
# A KL search ends between a kept and a refused plan once their costs are within this factor. The distance of their
# predicted losses then depends on the formats: 8 % at 2 bits per weight, 2 % at 1.25 bits per weight.
CLOSE_COSTS = 1.01
# The factor for a loss. On the example's 2,000 items one standard error equals 6 % of the cost. Further bisection
# picks the luckiest of equal plans, and the certificate then refuses it
# (docs/experiments/2026-11-22-where-bisection-stops.md).
CLOSE_COSTS_OF_LOSSES = 1.035
# Corrections hold for plans whose costs differ by at most this share.
SWAPPED_NEAR = 0.01
# A KL within this factor of the target needs no further measurement.
CLOSE_KL = 1.08
_SPREAD = 4.0
AIM = 0.93
Note = Callable[[str], None]


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


def search(space: SearchSpace, trials: Trials, target: Target, note: Note, swaps: Swaps = NO_SWAPS) -> CompilePlan:
    """Return the plan of least cost that keeps the target.

    Raises TargetUnreachable, which names the best possible value.
    """
    if target.kind == "loss":
        return _search_loss(space, trials, target.value, note, swaps).plan
    if target.kind == "kl":
        return _search_kl(space, trials, target.value, note, swaps).plan
    weights = space.plain.expert_weights
    budget = target.value if target.kind == "size" else target.value * weights / 8
    table = space.size_table()
    if least_loss(table, budget) is None:
        least = float(np.min(table.costs, axis=1).sum())
        raise TargetUnreachable(
            f"{target} is below the smallest plan on offer: {least:.0f} bytes, "
            f"{8 * least / weights:.3f} bits per weight",
            "ask for more, or offer smaller formats with `--bits` and `--group-size`",
        )

    def filled(space: SearchSpace) -> CompilePlan:
        choice = least_loss(space.size_table(), budget)
        if choice is None:
            raise RuntimeError("other predictions made the smallest plan larger")
        return space.plan(choice)

    if not trials.has_data:
        return filled(space)
    plan = filled(swaps.corrected(space, trials, filled)[0])
    trials.kl(plan, "search")
    return plan


def _search_kl(space: SearchSpace, trials: Trials, target: float, note: Note, swaps: Swaps) -> Found:
    """Return the plan of least cost whose `divergence_bound` is at most the target."""

    def bisect(space: SearchSpace, bracket: _Bracket, budget: float) -> None:
        most = _largest_budget(space)
        for _ in range(MAX_KL):
            budget = min(budget, most)
            plan, cost = _least_plan(space, budget)
            summary = trials.kl(plan, "search")
            measured = divergence_bound(summary)
            verdict = "kept" if measured <= target else "refused"
            note(f"{plan.bits_per_weight:.3f} bits per weight: {_kl_text(summary, target)}: {verdict}")
            bracket.add(Found(plan, budget, cost), measured <= target)
            is_used_up = target / CLOSE_KL <= measured <= target
            if is_used_up or bracket.is_closed(CLOSE_COSTS, most):
                return
            budget = bracket.next_budget(budget, target / max(measured, 1e-12))

    first = _Bracket()
    bisect(space, first, target)
    if first.low is None:
        return _most_precise(space, lambda plan: _kl_verdict(trials, plan, target), f"KL {target:g} nats per token")
    if first.low.predicted >= _largest_budget(space):
        return first.low  # no plan is cheaper
    better, gain = _corrected_at(space, trials, first.low.cost, swaps)
    second = _Bracket()
    if better is not space:
        bisect(better, second, _predicted_at(better, first.low.cost) * AIM / gain)
    return _cheaper(first.low, second.low)


@dataclass(slots=True)
class _Bracket:
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


def _cheaper(first: Found, second: Found | None) -> Found:
    return first if second is None or second.cost >= first.cost else second


def _corrected_at(space: SearchSpace, trials: Trials, cost: float, swaps: Swaps) -> tuple[SearchSpace, float]:
    """Correct the predictions by measured plans of this cost.

    Returns the corrected space, and the KL of its plan divided by the KL before. Without a gain the space is unchanged.
    """
    return swaps.corrected(space, trials, lambda tried: tried.plan(_within(tried.table, cost)))


def _within(table: ChoiceTable, cost: float) -> np.ndarray:
    """Return the choice of least predicted loss within this cost. The cost must be reachable."""
    choice = least_loss(table, cost * (1 + 1e-9))  # margin for rounded sums
    if choice is None:
        raise RuntimeError("no plan costs as little as one that was found")
    return choice


def _predicted_at(space: SearchSpace, cost: float) -> float:
    """Return the predicted loss of the best plan within a cost."""
    return space.table.totals(_within(space.table, cost))[1]


def _kl_verdict(trials: Trials, plan: CompilePlan, target: float) -> tuple[bool, str]:
    summary = trials.kl(plan, "most precise")
    return divergence_bound(summary) <= target, f"has {_kl_text(summary, target)}"


def _search_loss(space: SearchSpace, trials: Trials, target: float, note: Note, swaps: Swaps) -> Found:
    """Return the plan of least cost whose generated answers keep the target, as judged by `trials.keeps`.

    Swaps start once the cost is roughly known, because corrections are best at the cost at which they were measured.
    After that, plans of higher cost are not tried: at the cost of the best plan so far, swaps have one with less KL.
    """
    bracket, budget = _Bracket(), _calibrated_budget(space, trials, trials.first_kl_per_loss * target)
    kept = list[Found]()
    tell = _LossNotes(target, trials.certification_items, trials.available_items, note)

    def bisect(space: SearchSpace, bracket: _Bracket, budget: float, measurements: int, least: float = 0.0) -> float:
        most = _largest_budget(space)
        for _ in range(measurements):
            if bracket.is_closed(CLOSE_COSTS_OF_LOSSES, most) or bracket.high <= least:
                break
            budget = min(max(budget, least), most)
            plan, cost = _least_plan(space, budget)
            accepted, losses = trials.accepts(plan, target, "search")
            tell.plan(plan, losses, accepted)
            bracket.add(Found(plan, budget, cost), accepted)
            kept.extend([Found(plan, budget, cost)] if accepted else [])
            budget = bracket.next_budget(budget, _headroom(losses, target, trials.certification_items))
        return budget

    left = AFTER_SWAPS if swaps.measurements else 0
    budget = bisect(space, bracket, budget, MAX_GENERATED - left)
    if bracket.low is None:
        bisect(space, bracket, budget, left)
        left = 0
    first = bracket.low
    if first is None:
        return _most_precise(space, lambda plan: _loss_verdict(trials, plan, target), f"a loss of {target:.2%}")
    if not left or first.predicted >= _largest_budget(space):
        return first
    better, gain = _corrected_at(space, trials, first.cost, swaps)
    if better is space:
        bisect(space, bracket, budget, left)
    else:
        least = _predicted_at(better, first.cost)
        bisect(better, _Bracket(), least * AIM / gain, left, least)
    found = _least_kl(kept, trials)
    swapped = _swapped_at(better, trials, found, first.cost, swaps)
    if swapped is None:
        return found
    accepted, losses = trials.accepts(swapped.plan, target, "search")
    tell.plan(swapped.plan, losses, accepted)
    return swapped if accepted else found


def _swapped_at(space: SearchSpace, trials: Trials, found: Found, swapped_at: float, swaps: Swaps) -> Found | None:
    """Return a plan with less KL and at most the cost of `found`, or None if swaps have none.

    Its experts, which decoding reads, also take no more bytes.
    space: predictions corrected at the cost `swapped_at`. They are corrected again if `found` has another cost.
    """
    if abs(found.cost / swapped_at - 1) > SWAPPED_NEAR:
        space, _ = _corrected_at(space, trials, found.cost, swaps)
    choice = _within(space.table, found.cost)
    plan, (cost, predicted) = space.plan(choice), space.table.totals(choice)
    if plan.digest == found.plan.digest or plan.expert_packed_bytes > found.plan.expert_packed_bytes:
        return None
    if trials.kl(plan, "swaps").mean >= trials.kl(found.plan, "search").mean:
        return None
    return Found(plan, predicted, cost)


def _least_kl(kept: Sequence[Found], trials: Trials) -> Found:
    """Return the accepted plan with the least KL among the plans about as cheap as the cheapest.

    KL separates such plans better than their losses. Among plans with losses within each other's errors, the cheapest
    one is so by chance.
    """
    cheapest = min(found.cost for found in kept)
    alike = [found for found in kept if found.cost <= cheapest * CLOSE_COSTS_OF_LOSSES]
    if len(alike) == 1:
        return alike[0]
    return min(alike, key=lambda found: (trials.kl(found.plan, "search").mean, found.cost))


def _loss_verdict(trials: Trials, plan: CompilePlan, target: float) -> tuple[bool, str]:
    accepted, losses = trials.accepts(plan, target, "most precise")
    return accepted, f"measures {_losses_text(losses, target, trials.certification_items)}"


def _headroom(losses: dict[str, LossEstimate], target: float, items: Mapping[str, int]) -> float:
    """Return the factor by which the budget may grow if loss were proportional to it.

    The task with the least room decides.
    """
    rooms = []
    for task, loss in losses.items():
        room = target - margin(loss, items[task])  # the part of the target that the acceptance rule leaves for the loss
        rooms.append(room / max(loss.loss, target / _SPREAD) if room > 0 else 1 / _SPREAD)
    return min(rooms)


def _least_plan(space: SearchSpace, budget: float) -> tuple[CompilePlan, float]:
    """Return the plan of least cost within a predicted budget, and its cost."""
    choice = least_cost(space.table, budget)
    return space.plan(choice), space.table.totals(choice)[0]


def _largest_budget(space: SearchSpace) -> float:
    """Return the predicted loss of the cheapest plan, plus a margin for rounded sums. No larger budget is useful."""
    return space.table.totals(least_cost(space.table, math.inf))[1] * (1 + 1e-9)


def _calibrated_budget(space: SearchSpace, trials: Trials, kl: float) -> float:
    """Return the predicted budget whose plan measures about this KL, from a few cheap measurements."""
    budget = kl
    for _ in range(CALIBRATING_KL):
        measured = trials.kl(_least_plan(space, budget)[0], "search").mean
        if kl / CALIBRATED <= measured <= kl * CALIBRATED:
            break
        budget *= float(np.clip(kl / max(measured, 1e-9), 1 / 16, 16))
    return budget


def _most_precise(space: SearchSpace, judged: Callable[[CompilePlan], tuple[bool, str]], wanted: str) -> Found:
    """Return the least lossy plan, if it keeps the target.

    judged: returns whether a plan keeps the target, and its measurement as text.
    Raises TargetUnreachable otherwise.
    """
    plan, cost = _least_plan(space, 0.0)
    accepted, measured = judged(plan)
    if not accepted:
        raise TargetUnreachable(
            f"no plan on offer keeps {wanted}; the most precise one, {plan.bits_per_weight:.2f} bits per weight, "
            f"{measured}",
            "allow more loss, or offer more bits with `--bits` and `--dense-bits`",
        )
    return Found(plan, 0.0, cost)


@dataclass(eq=False)
class _LossNotes:
    """Says what was measured of each plan, and why it was kept or refused.

    items: number of items in the certificate of each task.
    available: number of validation items of each task, and of all items that the search may take.
    """

    target: float
    items: Mapping[str, int]
    available: Mapping[str, tuple[int, int]]
    note: Note
    _told: set[str] = field(default_factory=set)

    def plan(self, plan: CompilePlan, losses: Mapping[str, LossEstimate], accepted: bool) -> None:
        """Tell the verdict on a plan. Tell once where more items were taken, and how many would be needed."""
        verdict = "kept" if accepted else "refused"
        for task, loss in losses.items():
            validation = self.available[task][0]
            if loss.n > validation:
                self._once(
                    f"{task}: {loss.n - validation} train texts that nothing else uses join the {validation} "
                    "validation texts, to make the loss more precise"
                )
        self.note(
            f"{plan.bits_per_weight:.3f} bits per weight: {_losses_text(losses, self.target, self.items)}: {verdict}"
        )
        for task, loss in losses.items():
            needed, every = items_for_precision(loss, self.target), self.available[task][1]
            if loss.n == every < needed:
                self._once(
                    f"{task}: the loss has a standard error of {loss.standard_error:.2%} on {loss.n} items, all that "
                    f"the data holds for the search; {needed} items would make it a quarter of the target",
                    f"{task}: needed",
                )

    def _once(self, sentence: str, kind: str = "") -> None:
        """Tell a sentence, unless one of its kind was told."""
        if (kind or sentence) not in self._told:
            self._told.add(kind or sentence)
            self.note(sentence)


def _kl_text(summary: DistributionSummary, target: float) -> str:
    """Return a KL with the upper bound that decides."""
    upper = divergence_bound(summary)
    return f"KL {summary.mean:.4g}, upper bound {upper:.4g} {'<=' if upper <= target else '>'} {target:.4g}"


def _losses_text(losses: Mapping[str, LossEstimate], target: float, items: Mapping[str, int]) -> str:
    """Return each loss with the upper bound that decides, and its number of items."""
    parts = []
    for task, loss in losses.items():
        upper = upper_bound(loss, items[task])
        sign = "<=" if upper <= target else ">"
        parts.append(f"{task} {loss.loss:.2%} (n {loss.n}), upper bound {upper:.2%} {sign} {target:.2%}")
    return f"loss {', '.join(parts)}"
