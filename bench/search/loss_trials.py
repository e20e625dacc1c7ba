"""Simulated searches for a loss: bytes, supported certificates and measurements that answer.

    python -m bench.search.loss_trials [--seeds N]

A toy model of 32 experts whose predictions are wrong by up to a factor of 3 per unit. The true loss of a plan is a
power of its KL, times a factor of its own. A measured loss has a standard error of 0.4 %, as on the shipped example.
0.36 of its variance is common to all plans, because they answer the same items. The target is 2 %, and the certificate
has 4,000 items.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from moec.compiler.request.options import Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target
from moec.compiler.search.bisect import search
from moec.compiler.search.swaps import SWAPS, Swaps
from moec.evaluation.statistics import ONE_SIDED_95, LossEstimate
from tests.compiler.search.toy_search import ToyTrials, estimate, predicted_loss, toy_model, toy_space, uniform_number

NORMAL = NormalDist()
TARGET, ERROR, CERTIFIED = 0.02, 0.004, 4000
COMMON = 0.6


def main() -> None:
    """Print one row for each kind of model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    seeds = parser.parse_args().seeds
    print("power  spread  mean log bytes  spread of bytes  supported  answered")
    for power in (1.0, 1.3):
        for spread in (0.0, 0.2):
            found = np.array([simulated(seed, power, spread) for seed in range(seeds)])
            sizes = found[:, 0]
            spread_of_bytes = sizes.std() / sizes.mean()
            print(
                f"{power:5.1f}  {spread:6.1f}  {np.log(sizes).mean():14.3f}  {spread_of_bytes:15.3f}  "
                f"{found[:, 1].mean():9.3f}  {found[:, 2].mean():8.2f}"
            )


def simulated(seed: int, power: float, spread: float) -> tuple[float, float, int]:
    """Return the bytes of the plan, the probability that its certificate is supported, and the plans that answered."""
    space = toy_space(toy_model(layers=4, experts=8), seed=seed)
    factors = [3 ** (2 * uniform_number(f"{seed} {row}") - 1) for row in range(space.num_factors)]
    actual = space.rescaled(np.array(factors))
    trials = NoisyTrials(lambda plan: 0.02 * predicted_loss(actual, plan), seed, power, spread)
    plan = search(space, trials.as_trials(), Target("loss", TARGET), lambda _: None, Swaps(SWAPS, Talk()))
    error = ERROR * math.sqrt(2000 / CERTIFIED)
    supported = NORMAL.cdf((TARGET - ONE_SIDED_95 * error - trials.true_loss(plan)) / error)
    answered = len({tried.digest for tried in trials.generated})
    return plan.expert_packed_bytes + plan.dense_packed_bytes, supported, answered


class NoisyTrials(ToyTrials):
    """Trials whose losses are 5 times the KL at 0.003 nats, with noise that belongs to the plan."""

    certification_items: ClassVar[dict[str, int]] = {"toy": CERTIFIED}
    first_kl_per_loss = 0.1

    def __init__(self, kl_of: Callable[[CompilePlan], float], seed: int, power: float, spread: float) -> None:
        super().__init__(kl_of)
        self._seed, self._power, self._spread = seed, power, spread
        self._common = np.random.default_rng(seed).standard_normal()

    def _drawn(self, kind: str, plan: CompilePlan) -> float:
        return NORMAL.inv_cdf(min(max(uniform_number(f"{kind}{self._seed}{plan.digest}"), 1e-6), 1 - 1e-6))

    def true_loss(self, plan: CompilePlan) -> float:
        """Return the loss on endless items."""
        kl = self.kl(plan, "true").mean
        return float(5 * kl * (kl / 0.003) ** (self._power - 1) * math.exp(self._spread * self._drawn("true", plan)))

    def losses_of(self, plan: CompilePlan) -> dict[str, LossEstimate]:
        noise = COMMON * self._common + math.sqrt(1 - COMMON**2) * self._drawn("measured", plan)
        self.generated.append(plan)
        return {"toy": estimate(self.true_loss(plan) + ERROR * noise, ERROR)}


if __name__ == "__main__":
    main()
