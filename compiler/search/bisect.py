"""The search: predictions propose plans, measurements decide.

The knapsack gives a plan for a predicted loss in milliseconds. Its real loss is measured. The budget moves until the
measured value meets the target: a KL (bracket.py), or the loss of generated answers (loss_search.py). In between,
cheap measurements of plans at equal cost correct the predictions (swaps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from moec.evaluation.statistics import MIN_ITEMS, DistributionSummary
from moec.manifests.errors import TargetUnreachable

from ..request.plan import CompilePlan
from ..request.targets import Target
from ..sensitivity.acceptance import LEVELS, Level
from ..sensitivity.trials import Trials
from .boundary import Boundaries, Boundary, corrected_space
from .bracket import AIM, Found, KlLimit, choice_within, largest_budget, least_within, most_precise, predicted_at
from .knapsack import least_loss
from .loss_search import SAFER_KL, LossSearch
from .space import SearchSpace
from .swaps import NO_SWAPS, Swaps

MAX_KL = 8
"""Most measurements of one bisection for a KL target."""
Note = Callable[[str], None]


def search(
    space: SearchSpace,
    trials: Trials,
    target: Target,
    note: Note,
    swaps: Swaps = NO_SWAPS,
    boundaries: Boundaries | None = None,
) -> CompilePlan:
    """Return the first of the plans of `candidates`."""
    return candidates(space, trials, target, note, swaps, boundaries, ())[0]


def candidates(
    space: SearchSpace,
    trials: Trials,
    target: Target,
    note: Note,
    swaps: Swaps = NO_SWAPS,
    boundaries: Boundaries | None = None,
    safer: Sequence[Level] = LEVELS[1:],
    is_quick: bool = False,
) -> list[CompilePlan]:
    """Return the plan of least cost that keeps the target, and for a loss or a KL also plans of less KL.

    The certificate tests them in this order, until it supports one.
    boundaries: the ends of searches of other devices, by which this one may begin; None: it begins alone.
    safer: places in the list after the first.
    is_quick: no answers are measured. A plan that usually keeps a loss is the only one.
    Raises TargetUnreachable, which names the best possible value.
    """
    note = _each_once(note)
    if target.kind not in ("loss", "kl"):
        return [_within_size(space, trials, target, swaps)]
    known = None if boundaries is None else boundaries.of_another(space, target)
    further = list[CompilePlan]()
    if target.kind == "loss" and is_quick:
        kl = trials.first_kl_per_loss * target.value
        note(f"no answers choose the plan: a KL of {kl:.2g} nats per token usually loses about {target.value:.2%}")
        found, ended, _ = _search_kl(space, trials, kl, note, swaps, None)
    elif target.kind == "loss":
        loss_search = LossSearch(space, trials, target.value, note)
        found, ended = loss_search.run(swaps, known)
        further = loss_search.safer(found, safer)
    else:
        found, ended, searched = _search_kl(space, trials, target.value, note, swaps, known)
        further = _safer_kl(searched, trials, target.value, found, safer)
    if boundaries is not None and known is None:
        boundaries.keep(space, target, ended)
    return [found.plan, *further]


def _within_size(space: SearchSpace, trials: Trials, target: Target, swaps: Swaps) -> CompilePlan:
    """Return the plan of least predicted loss within a size. Raises TargetUnreachable."""
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


def _each_once(note: Note) -> Note:
    """Return a note that tells each sentence once. With few units, steps of a search may lead to the same plan."""
    noted = set[str]()

    def tell(sentence: str) -> None:
        if sentence not in noted:
            noted.add(sentence)
            note(sentence)

    return tell


def _search_kl(
    space: SearchSpace, trials: Trials, target: float, note: Note, swaps: Swaps, known: Boundary | None
) -> tuple[Found, Boundary, SearchSpace]:
    """Return the plan of least cost whose bound is at most the target, the end of the search, and the plan's space."""
    limit, plain = KlLimit(target, trials.kl_bound, MAX_KL), np.ones(space.num_factors)

    def report(plan: CompilePlan, summary: DistributionSummary, is_kept: bool) -> None:
        verdict = "kept" if is_kept else "refused"
        note(f"{plan.bits_per_weight:.3f} bits per weight: {_kl_text(summary, trials, target)}: {verdict}")

    def judged(plan: CompilePlan) -> tuple[bool, str]:
        summary = trials.kl(plan, "most precise")
        return trials.kl_bound(summary) <= target, f"has {_kl_text(summary, trials, target)}"

    if known is not None:
        space = corrected_space(space, trials, known)
    first = least_within(space, trials, limit, target, report)
    if first is None:
        precise = most_precise(space, judged, f"KL {target:g} nats per token")
        return precise, Boundary(target, precise.predicted, (), plain), space
    if known is not None or first.predicted >= largest_budget(space):
        # swaps were made for another device, or no plan is cheaper
        return first, Boundary(target, first.predicted, (), plain), space
    cost = first.cost
    better = swaps.corrected(space, trials, lambda tried: tried.plan(choice_within(tried.table, cost)))
    second = None
    if better.space is not space:
        budget = predicted_at(better.space, cost) * AIM / better.gain
        second = least_within(better.space, trials, limit, budget, report, first.exponent)
    is_second = second is not None and second.cost < first.cost
    cheaper = second if second is not None and is_second else first
    return cheaper, Boundary(target, cheaper.predicted, (), better.factors), better.space if is_second else space


def _safer_kl(
    space: SearchSpace, trials: Trials, target: float, best: Found, levels: Sequence[Level]
) -> list[CompilePlan]:
    """Return plans of less KL than the result, for later places of the list that the certificate tests.

    None with fewer held-out texts than a verdict needs, and after the most precise plan.
    levels: the later places.
    """
    if not best.predicted or min(trials.held_out_texts) < MIN_ITEMS:
        return []
    plans, last = [best.plan], best
    for level in levels:
        limit = KlLimit(target, partial(trials.kl_bound, level=level), SAFER_KL)
        bound = limit.measured(trials.kl(last.plan, "search"))
        if bound > target:
            budget = last.predicted * (AIM * target / bound) ** (1 / last.exponent)
            found = least_within(space, trials, limit, budget, exponent=last.exponent)
            if found is None:
                break
            last = found
        plans.append(last.plan)
    return list({plan.digest: plan for plan in plans}.values())[1:]


def _kl_text(summary: DistributionSummary, trials: Trials, target: float) -> str:
    """Return a KL with the upper bound that decides."""
    upper = trials.kl_bound(summary)
    return f"KL {summary.mean:.4g}, upper bound {upper:.4g} {'<=' if upper <= target else '>'} {target:.4g}"
