"""The search for a loss of generated answers: the KL orders plans, the losses of all measured plans decide.

1. The plan of least cost at a first KL answers the validation items. Its loss gives the next KL, and so on.
2. Swaps correct the predictions at about the cost of the result, by KL alone (swaps.py).
3. The plan of least cost at the KL that uses the target up answers again, until that KL stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.evaluation.statistics import DistributionSummary, LossEstimate

from ..request.plan import CompilePlan
from ..sensitivity.acceptance import Level, items_for_precision
from ..sensitivity.trials import Trials
from .boundary import Boundary, corrected_space
from .bracket import Found, KlLimit, choice_within, largest_budget, least_plan, least_within, most_precise, predicted_at
from .loss_by_kl import LEAST_KL, LossByKl
from .space import SearchSpace
from .swaps import Swaps

BEFORE_SWAPS = 3
AFTER_SWAPS = 3
# Measurements of answers of a search that begins where another device's ended. If none is kept, it begins alone.
FROM_BOUNDARY = 3
MAX_GENERATED = BEFORE_SWAPS + AFTER_SWAPS
# Most KL measurements for one plan that answers.
KL_STEPS = 5
# Most KL measurements for a later plan of the list that the certificate tests.
SAFER_KL = 3
# Factor by which the KL falls where nothing says how far the loss would fall.
LOWER = 8.0
# Plans that answer in a usual search, and its KL measurements, swaps apart (bench/search/loss_trials.py: 3.4 and 12.3).
USUAL_GENERATED = 4
USUAL_KL = 12
# Factor between the KL of a plan and the KL that would use the target up, at which the search ends. It is about 3 % of
# the bytes on the example.
CLOSE_KL = 1.1
# Swaps lower the KL by about a tenth. They begin at a plan whose KL is higher by this factor, so that the result, at
# the cost of the swaps, has the KL that is wanted.
SWAPPED_KL = 1.1
Note = Callable[[str], None]


def mean_of(summary: DistributionSummary) -> float:
    """Return the mean of a KL."""
    return summary.mean


class LossSearch:
    """Looks for the plan of least cost whose generated answers keep the target, as LossByKl judges it."""

    def __init__(self, space: SearchSpace, trials: Trials, target: float, note: Note) -> None:
        self._space, self._trials, self._target = space, trials, target
        self._relation = LossByKl(target, trials.certification_items)
        self._tell = _LossNotes(target, self._relation, trials.available_items, note)
        self._kept, self._judged = list[tuple[Found, SearchSpace]](), set[str]()
        self._exponent = 1.0  # power of the predicted loss with which the KL rises, as measured so far

    def run(self, swaps: Swaps, known: Boundary | None) -> tuple[Found, Boundary]:
        """Return the plan and the end of the search. An earlier search is used if there is one and it leads to a plan.

        Raises TargetUnreachable if the most precise plan is refused too.
        """
        if known is not None and self._from(known):
            return self._ended(np.ones(self._space.num_factors))
        return self._ended(self._alone(swaps))

    def safer(self, best: Found, levels: Sequence[Level]) -> list[CompilePlan]:
        """Return plans of less KL than the result, for later places of the list that the certificate tests.

        levels: the later places.
        """
        space = next((space for kept, space in self._kept if kept is best), None)
        if space is None:  # the result is the most precise plan
            return []
        plans, last, kl = [best.plan], best, max(self._mean_kl(best.plan), LEAST_KL)
        for level in levels:
            wanted = min(self._relation.used_up(level) or kl / 2, kl / CLOSE_KL)
            budget = last.predicted * (wanted / kl) ** (1 / last.exponent)
            cheapest = least_within(
                space, self._trials, KlLimit(wanted, mean_of, SAFER_KL), budget, exponent=last.exponent
            )
            if cheapest is None:
                break
            plans.append(cheapest.plan)
            last, kl = cheapest, max(self._mean_kl(cheapest.plan), LEAST_KL)
        return list({plan.digest: plan for plan in plans[1:] if plan.digest != best.plan.digest}.values())

    def _ended(self, factors: np.ndarray) -> tuple[Found, Boundary]:
        kept = [candidate for candidate, _ in self._kept]
        best = min(kept, key=lambda candidate: candidate.cost) if kept else self._most_precise()
        end = Boundary(self._relation.used_up(), best.predicted, tuple(self._relation.measured), factors)
        return best, end

    def _alone(self, swaps: Swaps) -> np.ndarray:
        """Search without earlier knowledge, and return the corrections by swaps."""
        space = self._space
        kl = self._trials.first_kl_per_loss * self._target
        accepted = self._approach(space, kl, kl, BEFORE_SWAPS)
        unchanged = np.ones(space.num_factors)
        if accepted is None and not self._relation.measured:
            return unchanged  # no plan has so little KL: the most precise one answers
        if accepted is None:
            kl = self._relation.used_up() or min(plan.kl for plan in self._relation.measured) / LOWER
            self._approach(space, kl, kl, AFTER_SWAPS)
            return unchanged
        if accepted.predicted >= largest_budget(space):
            return unchanged
        wanted, measured = self._relation.used_up(), max(self._mean_kl(accepted.plan), LEAST_KL)
        factor = SWAPPED_KL * wanted / measured
        cost = least_plan(space, accepted.predicted * factor)[1]
        better = swaps.corrected(space, self._trials, lambda tried: tried.plan(choice_within(tried.table, cost)))
        if better.space is not space:
            self._approach(better.space, wanted, predicted_at(better.space, cost), AFTER_SWAPS)
        elif wanted > CLOSE_KL * measured:
            self._approach(
                space, wanted, accepted.predicted * (wanted / measured) ** (1 / accepted.exponent), AFTER_SWAPS
            )
        return better.factors

    def _from(self, known: Boundary) -> bool:
        """Begin at the KL where an earlier search ended, with its measurements and corrections.

        Returns whether a plan is kept.
        """
        for plan in known.measured:
            self._relation.add(plan)
        space = corrected_space(self._space, self._trials, known)
        return self._approach(space, known.kl, known.predicted, FROM_BOUNDARY) is not None

    def _approach(self, space: SearchSpace, kl: float, budget: float, answered: int) -> Found | None:
        """Measure answers of the plans of least cost at a KL, and move the KL to where the target is used up.

        budget: predicted loss of the first plan.
        answered: most plans that answer.
        Returns the last accepted plan, or None.
        """
        last, most = None, largest_budget(space)
        for _ in range(answered):
            limit = KlLimit(kl, mean_of, KL_STEPS)
            cheapest = least_within(space, self._trials, limit, budget, exponent=self._exponent)
            if cheapest is None or cheapest.plan.digest in self._judged:
                break
            self._exponent = cheapest.exponent
            measured, is_kept = self._mean_kl(cheapest.plan), self._judge(cheapest, space)
            kl = self._relation.used_up() or measured / LOWER
            last = cheapest if is_kept else last
            if is_kept and (kl <= CLOSE_KL * measured or cheapest.predicted >= most):
                break
            budget = cheapest.predicted * (kl / max(measured, LEAST_KL)) ** (1 / cheapest.exponent)
        return last

    def _mean_kl(self, plan: CompilePlan) -> float:
        return self._trials.kl(plan, "search").mean

    def _judge(self, candidate: Found, space: SearchSpace) -> bool:
        """Measure the answers of a plan, and return whether it is kept."""
        accepted, losses = self._relation.judge(self._trials, candidate.plan, "search")
        self._judged.add(candidate.plan.digest)
        self._tell.plan(candidate.plan, losses, accepted)
        if accepted:
            self._kept.append((candidate, space))
        return accepted

    def _most_precise(self) -> Found:
        def judged(plan: CompilePlan) -> tuple[bool, str]:
            accepted, losses = self._relation.judge(self._trials, plan, "most precise")
            return accepted, f"measures {self._tell.losses(losses)}"

        return most_precise(self._space, judged, f"a loss of {self._target:.2%}")


@dataclass(eq=False)
class _LossNotes:
    """Says what was measured of each plan, and why it was kept or refused.

    relation: judges plans.
    available: number of validation items of each task, and of all items that the search may take.
    """

    target: float
    relation: LossByKl
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
        self.note(f"{plan.bits_per_weight:.3f} bits per weight: {self.losses(losses)}: {verdict}")
        for task, loss in losses.items():
            needed, every = items_for_precision(loss, self.target), self.available[task][1]
            if loss.n == every < needed:
                self._once(
                    f"{task}: the loss has a standard error of {loss.standard_error:.2%} on {loss.n} items, all that "
                    f"the data holds for the search; {needed} items would make it a quarter of the target",
                    f"{task}: needed",
                )

    def losses(self, losses: Mapping[str, LossEstimate]) -> str:
        """Return each loss of the plan judged last, what its KL lets expect, and the upper bound that decides."""
        plan = self.relation.measured[-1]
        parts = []
        for task, loss in losses.items():
            upper, expected = self.relation.bound_of(plan, task), self.relation.loss(task, plan.kl)
            sign = "<=" if upper <= self.target else ">"
            parts.append(
                f"{task} {loss.loss:.2%} (n {loss.n}), {expected:.2%} by its KL, "
                f"upper bound {upper:.2%} {sign} {self.target:.2%}"
            )
        return f"loss {', '.join(parts)}"

    def _once(self, sentence: str, kind: str = "") -> None:
        """Tell a sentence, unless one of its kind was told."""
        if (kind or sentence) not in self._told:
            self._told.add(kind or sentence)
            self.note(sentence)
