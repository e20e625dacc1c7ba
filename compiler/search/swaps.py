"""Local swaps: what predictions do not see, found by measuring plans of equal cost.

Predictions add up over units and plans do not: half of a plan's KL is interaction, more where experts are left out. So
plans are varied around the best one, all within its cost: every predicted loss is multiplied by a random factor, the
knapsack solved again, the KL of its plan measured, and the factors stay where it fell. What comes out is a table of
predictions that the rest of the search works with. Gains: docs/experiments.md, Swaps at equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..request.options import Talk
from ..request.plan import CompilePlan
from ..sensitivity.trials import Trials
from .space import SearchSpace

SWAPS = 24
"""Measurements where the model fits in memory: half a minute on the example."""
PATIENCE = 12
"""Measurements without a gain after which no more are made."""
_SPREAD = 0.15
"""Standard deviation of the logarithm of a factor."""
_SEED = 0
PlanOf = Callable[[SearchSpace], CompilePlan]


@dataclass(frozen=True, slots=True)
class Swaps:
    """How many measurements are spent, 0 for none, and who is told."""

    measurements: int
    talk: Talk

    def corrected(self, space: SearchSpace, trials: Trials, plan_of: PlanOf) -> tuple[SearchSpace, float]:
        """The space whose plan has the least KL that was found, and that KL over the one before.

        plan_of: the plan of a space at the cost at hand.
        """
        if self.measurements < 1:
            return space, 1.0
        generator, count = np.random.default_rng(_SEED), space.num_factors
        progress = self.talk.progress("swapping formats at equal bytes")
        best, factors, failed = space, np.ones(count), 0
        first = least = trials.kl(plan_of(space), "search").mean
        for done in range(1, self.measurements + 1):
            tried = factors * np.exp(_SPREAD * generator.standard_normal(count))
            candidate = space.rescaled(tried)
            measured = trials.kl(plan_of(candidate), "swaps").mean
            failed += 1
            if measured < least:
                best, factors, least, failed = candidate, tried, measured, 0
            if failed == PATIENCE:
                progress(self.measurements, self.measurements)
                break
            progress(done, self.measurements)
        self.talk.note(f"swaps at equal bytes: KL {first:.5f} before, {least:.5f} after {done}")
        return best, least / first if first > 0 else 1.0


NO_SWAPS = Swaps(0, Talk())
