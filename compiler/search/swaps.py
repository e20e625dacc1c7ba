"""Swaps: measured plans of equal cost correct effects that predictions miss.

Predictions add up over units, but losses of plans do not: half of a plan's KL is interaction, and more with pruned
experts. The search therefore varies the best plan within its cost:
1. Multiply every predicted loss by a random factor.
2. Solve the knapsack again, and measure the KL of its plan.
3. Keep the factors if the KL is lower.

The result is a table of corrected predictions for the rest of the search.
Gains: docs/experiments/2026-11.md, 22: Swaps in the compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..request.options import Talk
from ..request.plan import CompilePlan
from ..sensitivity.trials import Trials
from .space import SearchSpace

SWAPS = 24
"""Number of measurements if the model fits in memory: half a minute on the example."""
PATIENCE = 12
"""Number of measurements without a gain after which swaps end."""
_SPREAD = 0.15
"""Standard deviation of the logarithm of a factor."""
_SEED = 0
PlanOf = Callable[[SearchSpace], CompilePlan]


class Corrected(NamedTuple):
    """The result of swaps.

    space: the space whose plan has the least measured KL.
    gain: this KL divided by the KL before.
    factors: what predicted losses were multiplied by, [num_factors].
    """

    space: SearchSpace
    gain: float
    factors: np.ndarray


@dataclass(frozen=True, slots=True)
class Swaps:
    """Settings of the swaps.

    measurements: number of measurements, 0 for none.
    talk: output.
    """

    measurements: int
    talk: Talk

    def corrected(self, space: SearchSpace, trials: Trials, plan_of: PlanOf) -> Corrected:
        """Look for the space whose plan has the least measured KL.

        plan_of: the plan of a space at the current cost.
        """
        count = space.num_factors
        if self.measurements < 1:
            return Corrected(space, 1.0, np.ones(count))
        generator = np.random.default_rng(_SEED)
        progress = self.talk.progress("swapping formats at equal bytes")
        best, factors, failed = space, np.ones(count), 0
        start = plan_of(space)
        first = least = trials.kl(start, "search").mean
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
        self.talk.note(
            f"swaps at equal bytes, tried in a plan of {start.bits_per_weight:.3f} bits per weight: "
            f"KL {first:.5f} before, {least:.5f} after {done}"
        )
        return Corrected(best, least / first if first > 0 else 1.0, factors)


NO_SWAPS = Swaps(0, Talk())
