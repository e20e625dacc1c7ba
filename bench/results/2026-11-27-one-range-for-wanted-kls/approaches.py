"""Measurements until a plan reaches a wanted KL on a toy model.

Run in the root of the repository, with its environment. It also runs on the search of 6bf6eec.
"""

import sys
from collections.abc import Callable

from moec.compiler.request.plan import CompilePlan
from moec.compiler.search import loss_search
from moec.compiler.search.kl_bisection import KlLimit, least_within
from moec.compiler.search.space import SearchSpace

sys.path.insert(0, ".")
from tests.compiler.search.toy_search import ToyTrials, predicted_loss, toy_model, toy_space, uniform_number

WANTED, NOISE = 0.02, 0.01


def kl_with(space: SearchSpace, power: float) -> Callable[[CompilePlan], float]:
    """Return a KL that is a power of the predicted loss, with noise."""

    def kl(plan: CompilePlan) -> float:
        wobble = 1 + NOISE * (2 * uniform_number(plan.digest) - 1)
        return float(1.7 * predicted_loss(space, plan) ** power * wobble)

    return kl


former_range = [loss_search.AT_KL] if hasattr(loss_search, "AT_KL") else []
print("power  mean  most  not found")
for power in (0.5, 0.65, 0.8, 1.0, 1.3):
    counts, missing = [], 0
    for seed in range(8):
        space = toy_space(toy_model(layers=6, experts=16), seed=seed)
        trials = ToyTrials(kl_with(space, power))
        limit = KlLimit(WANTED, loss_search.mean_of, loss_search.KL_STEPS, *former_range)
        missing += least_within(space, trials.as_trials(), limit, WANTED) is None
        counts.append(len(trials.measured))
    print(f"{power:5.2f} {sum(counts) / len(counts):5.1f} {max(counts):5d} {missing:10d}")
