"""The search: predictions propose plans, measurements decide.

The knapsack gives a plan for a predicted loss in milliseconds. Its real loss is measured. The budget moves until the
measured value meets the target, with at most MAX_GENERATED measurements on generated answers. A search that begins
where that of another device ended has at most FROM_BOUNDARY. If none of them is kept, it begins again, alone.
In between, cheap measurements of plans at equal cost correct the predictions (swaps.py). One more measurement on
answers judges the plan that swaps derive from the accepted plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moec.evaluation.divergence import divergence_bound
from moec.evaluation.statistics import DistributionSummary, LossEstimate
from moec.manifests.errors import TargetUnreachable

from ..request.plan import CompilePlan
from ..request.targets import Target
from ..sensitivity.acceptance import items_for_precision, upper_bound
from ..sensitivity.trials import Trials
from .boundary import Boundaries, Boundary, Ended, budget_at, corrected_space
from .bracket import (
    AIM,
    Bracket,
    Found,
    budget_of_kl,
    choice_within,
    headroom,
    largest_budget,
    least_plan,
    predicted_at,
)
from .knapsack import least_loss
from .space import SearchSpace
from .swaps import NO_SWAPS, Corrected, Swaps

MAX_GENERATED = 8
# Part of MAX_GENERATED, reserved for plans after swaps. More would bisect below the resolution of the losses.
AFTER_SWAPS = 2
# Measurements of answers of a search that begins where another device's ended. If none is kept, it begins alone.
FROM_BOUNDARY = 3
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
# A KL this factor below its target needs no further measurement.
USED_UP = 1.08
Note = Callable[[str], None]


def search(
    space: SearchSpace,
    trials: Trials,
    target: Target,
    note: Note,
    swaps: Swaps = NO_SWAPS,
    boundaries: Boundaries | None = None,
) -> CompilePlan:
    """Return the plan of least cost that keeps the target.

    boundaries: the ends of searches of other devices, by which this one may begin; None: it begins alone.
    Raises TargetUnreachable, which names the best possible value.
    """
    if target.kind in ("loss", "kl"):
        known = None if boundaries is None else boundaries.of_another(space, target)
        if target.kind == "loss":
            ended = _LossSearch(space, trials, target.value, note).run(swaps, known)
        else:
            ended = _search_kl(space, trials, target.value, note, swaps, known)
        if boundaries is not None and known is None:
            boundaries.keep(space, target, trials, ended)
        return ended.found.plan
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
    plan = filled(swaps.corrected(space, trials, filled).space)
    trials.kl(plan, "search")
    return plan


def _search_kl(
    space: SearchSpace, trials: Trials, target: float, note: Note, swaps: Swaps, known: Boundary | None
) -> Ended:
    """Return the plan of least cost whose `divergence_bound` is at most the target."""

    def bisect(space: SearchSpace, bracket: Bracket, budget: float) -> None:
        most = largest_budget(space)
        for _ in range(MAX_KL):
            budget = min(budget, most)
            plan, cost = least_plan(space, budget)
            summary = trials.kl(plan, "search")
            measured = divergence_bound(summary)
            verdict = "kept" if measured <= target else "refused"
            note(f"{plan.bits_per_weight:.3f} bits per weight: {_kl_text(summary, target)}: {verdict}")
            bracket.add(Found(plan, budget, cost), measured <= target)
            is_used_up = target / USED_UP <= measured <= target
            if is_used_up or bracket.is_closed(CLOSE_COSTS, most):
                return
            budget = bracket.next_budget(budget, target / max(measured, 1e-12))

    first, plain = Bracket(), np.ones(space.num_factors)
    if known is not None:
        space = corrected_space(space, trials, known)
    bisect(space, first, target)
    if first.low is None:
        found = _most_precise(space, lambda plan: _kl_verdict(trials, plan, target), f"KL {target:g} nats per token")
        return Ended(found, (), plain)
    if known is not None or first.low.predicted >= largest_budget(space):
        return Ended(first.low, (), plain)  # swaps were made for another device, or no plan is cheaper
    better = _corrected_at(space, trials, first.low.cost, swaps)
    second = Bracket()
    if better.space is not space:
        bisect(better.space, second, predicted_at(better.space, first.low.cost) * AIM / better.gain)
    return Ended(_cheaper(first.low, second.low), (), better.factors)


def _cheaper(first: Found, second: Found | None) -> Found:
    return first if second is None or second.cost >= first.cost else second


def _corrected_at(space: SearchSpace, trials: Trials, cost: float, swaps: Swaps) -> Corrected:
    """Correct the predictions by measured plans of this cost. Without a gain the space is unchanged."""
    return swaps.corrected(space, trials, lambda tried: tried.plan(choice_within(tried.table, cost)))


def _kl_verdict(trials: Trials, plan: CompilePlan, target: float) -> tuple[bool, str]:
    summary = trials.kl(plan, "most precise")
    return divergence_bound(summary) <= target, f"has {_kl_text(summary, target)}"


class _LossSearch:
    """Looks for the plan of least cost whose generated answers keep the target, as judged by `trials.keeps`."""

    def __init__(self, space: SearchSpace, trials: Trials, target: float, note: Note) -> None:
        self._space, self._trials, self._target = space, trials, target
        self._tell = _LossNotes(target, trials.certification_items, trials.available_items, note)
        self._kept, self._refused = list[Found](), list[Found]()

    def run(self, swaps: Swaps, known: Boundary | None) -> Ended:
        """Return the plan, by the knowledge of an earlier search if there is one and it leads to a plan."""
        found = None if known is None else self._from(known)
        return self._alone(swaps) if found is None else Ended(found, self._refused, self._no_factors)

    def _alone(self, swaps: Swaps) -> Ended:
        """Search without earlier knowledge.

        Swaps start once the cost is roughly known, because corrections are best at the cost at which they were
        measured. After that, plans of higher cost are not tried: at the cost of the best plan so far, swaps have one
        with less KL.
        """
        space, trials, target = self._space, self._trials, self._target
        kl, bracket = trials.first_kl_per_loss * target, Bracket()
        budget, _ = budget_of_kl(space, trials, kl, kl, CALIBRATED, CALIBRATING_KL)
        left = AFTER_SWAPS if swaps.measurements else 0
        budget = self._bisect(space, bracket, budget, MAX_GENERATED - left)
        if bracket.low is None:
            self._bisect(space, bracket, budget, left)
            left = 0
        first = bracket.low
        if first is None:
            judged = partial(_loss_verdict, trials, target=target)
            found = _most_precise(space, judged, f"a loss of {target:.2%}")
            return Ended(found, self._refused, self._no_factors)
        if not left or first.predicted >= largest_budget(space):
            return Ended(first, self._refused, self._no_factors)
        better = _corrected_at(space, trials, first.cost, swaps)
        if better.space is space:
            self._bisect(space, bracket, budget, left)
        else:
            least = predicted_at(better.space, first.cost)
            self._bisect(better.space, Bracket(), least * AIM / better.gain, left, least)
        found = _least_kl(self._kept, trials)
        swapped = _swapped_at(better.space, trials, found, first.cost, swaps)
        if swapped is not None and self._accepts(swapped.plan)[0]:
            found = swapped
        return Ended(found, self._refused, better.factors)

    def _from(self, known: Boundary) -> Found | None:
        """Begin at the KL of the plan that an earlier search took, with its corrections; None if no plan is kept."""
        space = corrected_space(self._space, self._trials, known)
        budget, measured = budget_at(space, self._trials, known)
        bracket = Bracket()
        if math.isfinite(known.refused_kl) and measured > 0:
            bracket.high = budget * known.refused_kl / measured
            bracket.high_cost = least_plan(space, bracket.high)[1]
        self._bisect(space, bracket, budget, FROM_BOUNDARY)
        return bracket.low

    @property
    def _no_factors(self) -> np.ndarray:
        return np.ones(self._space.num_factors)

    def _accepts(self, plan: CompilePlan) -> tuple[bool, dict[str, LossEstimate]]:
        accepted, losses = self._trials.accepts(plan, self._target, "search")
        self._tell.plan(plan, losses, accepted)
        return accepted, losses

    def _bisect(
        self, space: SearchSpace, bracket: Bracket, budget: float, measurements: int, least: float = 0.0
    ) -> float:
        """Move a bracket by at most this many measurements, and return the next budget.

        least: no smaller budget is tried.
        """
        most = largest_budget(space)
        for _ in range(measurements):
            if bracket.is_closed(CLOSE_COSTS_OF_LOSSES, most) or bracket.high <= least:
                break
            budget = min(max(budget, least), most)
            plan, cost = least_plan(space, budget)
            found = Found(plan, budget, cost)
            accepted, losses = self._accepts(plan)
            bracket.add(found, accepted)
            (self._kept if accepted else self._refused).append(found)
            budget = bracket.next_budget(budget, headroom(losses, self._target, self._trials.certification_items))
        return budget


def _swapped_at(space: SearchSpace, trials: Trials, found: Found, swapped_at: float, swaps: Swaps) -> Found | None:
    """Return a plan with less KL and at most the cost of `found`, or None if swaps have none.

    Its experts, which decoding reads, also take no more bytes.
    space: predictions corrected at the cost `swapped_at`. They are corrected again if `found` has another cost.
    """
    if abs(found.cost / swapped_at - 1) > SWAPPED_NEAR:
        space = _corrected_at(space, trials, found.cost, swaps).space
    choice = choice_within(space.table, found.cost)
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


def _most_precise(space: SearchSpace, judged: Callable[[CompilePlan], tuple[bool, str]], wanted: str) -> Found:
    """Return the least lossy plan, if it keeps the target.

    judged: returns whether a plan keeps the target, and its measurement as text.
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
                    f"{task}: {loss.n - validation} train texts that neither calibration nor gradients use join the "
                    f"{validation} validation texts, to make the loss more precise"
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
