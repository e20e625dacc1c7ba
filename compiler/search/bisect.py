"""The search: predictions propose plans, measurements decide.

The knapsack gives a plan for a predicted loss in milliseconds. Its real loss is measured. The budget moves until the
measured value meets the target: a KL (bracket.py), or the loss of generated answers (loss_search.py). In between,
cheap measurements of plans at equal cost correct the predictions (swaps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moec.evaluation.statistics import DistributionSummary, divergence_bound
from moec.manifests.errors import TargetUnreachable

from ..request.plan import CompilePlan
from ..request.targets import Target
from ..sensitivity.acceptance import LEVELS, Level
from ..sensitivity.trials import Trials
from .boundary import Boundaries, Boundary, corrected_space
from .bracket import AIM, Found, KlLimit, choice_within, largest_budget, least_within, most_precise, predicted_at
from .knapsack import least_loss
from .loss_search import LossSearch
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
) -> list[CompilePlan]:
    """Return the plan of least cost that keeps the target, and for a loss also plans of less KL and higher cost.

    The certificate tests them in this order, until it supports one.
    boundaries: the ends of searches of other devices, by which this one may begin; None: it begins alone.
    safer: places in the list after the first.
    Raises TargetUnreachable, which names the best possible value.
    """
    note = _each_once(note)
    if target.kind not in ("loss", "kl"):
        return [_within_size(space, trials, target, swaps)]
    known = None if boundaries is None else boundaries.of_another(space, target)
    further = list[CompilePlan]()
    if target.kind == "loss":
        loss_search = LossSearch(space, trials, target.value, note)
        found, ended = loss_search.run(swaps, known)
        further = loss_search.safer(found, safer)
    else:
        found, ended = _search_kl(space, trials, target.value, note, swaps, known)
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
) -> tuple[Found, Boundary]:
    """Return the plan of least cost whose `divergence_bound` is at most the target, and the end of the search."""
    limit, plain = KlLimit(target, divergence_bound, MAX_KL), np.ones(space.num_factors)

    def report(plan: CompilePlan, summary: DistributionSummary, is_kept: bool) -> None:
        verdict = "kept" if is_kept else "refused"
        note(f"{plan.bits_per_weight:.3f} bits per weight: {_kl_text(summary, target)}: {verdict}")

    def judged(plan: CompilePlan) -> tuple[bool, str]:
        summary = trials.kl(plan, "most precise")
        return divergence_bound(summary) <= target, f"has {_kl_text(summary, target)}"

    if known is not None:
        space = corrected_space(space, trials, known)
    first = least_within(space, trials, limit, target, report)
    if first is None:
        precise = most_precise(space, judged, f"KL {target:g} nats per token")
        return precise, Boundary(target, precise.predicted, (), plain)
    if known is not None or first.predicted >= largest_budget(space):
        return first, Boundary(
            target, first.predicted, (), plain
        )  # swaps were made for another device, or no plan is cheaper
    cost = first.cost
    better = swaps.corrected(space, trials, lambda tried: tried.plan(choice_within(tried.table, cost)))
    second = None
    if better.space is not space:
        budget = predicted_at(better.space, cost) * AIM / better.gain
        second = least_within(better.space, trials, limit, budget, report, first.exponent)
    cheaper = first if second is None or second.cost >= first.cost else second
    return cheaper, Boundary(target, cheaper.predicted, (), better.factors)


def _kl_text(summary: DistributionSummary, target: float) -> str:
    """Return a KL with the upper bound that decides."""
    upper = divergence_bound(summary)
    return f"KL {summary.mean:.4g}, upper bound {upper:.4g} {'<=' if upper <= target else '>'} {target:.4g}"
