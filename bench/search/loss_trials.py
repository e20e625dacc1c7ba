"""Simulated searches for a loss: bytes, supported certificates, errors of the promise, and measurements that answer.

    python -m bench.search.loss_trials [--seeds N] [--items N --certified N] [--swaps N] [--looks] [--target LOSS]

A toy model of 32 experts whose predictions are wrong by up to a factor of 3 per unit. The true loss of a plan is a
power of its KL, times a factor of its own. A measured loss has a standard error of 0.4 %, as on the shipped example.
0.36 of its variance is common to all plans, because they answer the same items. The target is 2 %, and the certificate
has 4,000 items. It tests the plans that the search hands over, in their order, until it supports one.

With `--items`, the variance of a loss rises with the KL, as the number of items whose answers differ does. The
standard error on 2,000 items at a KL of 0.0019 is 0.42 %. The shipped example has these values.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from moec.compiler.bundle.looks import LOOKS, look_errors
from moec.compiler.request.options import Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target
from moec.compiler.search.bisect import candidates
from moec.compiler.search.swaps import SWAPS, Swaps
from moec.compiler.sensitivity.acceptance import LEVELS
from moec.evaluation.statistics import ERROR, LossEstimate
from tests.compiler.search.toy_search import ToyTrials, estimate, predicted_loss, toy_model, toy_space, uniform_number

NORMAL = NormalDist()
COMMON = 0.6
DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Noise:
    """The standard error of a loss.

    error: that of a measured loss on `items` items, at the KL `kl`. It is the same at all KLs if `kl` is 0.
    certified: number of items of the certificate.
    """

    items: int = 2000
    certified: int = 4000
    error: float = 0.004
    kl: float = 0.0

    def at(self, kl: float, items: int) -> float:
        """Return the standard error of a loss at a KL, on a number of items."""
        rise = math.sqrt(kl / self.kl) if self.kl else 1.0
        return self.error * math.sqrt(self.items / items) * rise


def main() -> None:
    """Print one row for each kind of model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--items", type=int, help="validation items; the error then rises with the KL")
    parser.add_argument("--swaps", type=int, default=SWAPS, help="0: as where memory does not hold the model")
    parser.add_argument("--certified", type=int, default=4000, help="items of the certificate")
    parser.add_argument("--looks", action="store_true", help="the certificate may end early, as for a large model")
    parser.add_argument("--target", type=float, default=0.02, help="largest relative loss")
    options = parser.parse_args()
    noise = Noise(certified=options.certified)
    if options.items:
        noise = Noise(options.items, options.certified, 0.0042 * math.sqrt(2000 / options.items), 0.0019)
    print("power  spread  mean log bytes  spread of bytes  supported  false  tested  items  answered")
    for power in (1.0, 1.3):
        for spread in (0.0, 0.2):
            compiles = [
                simulated(seed, power, spread, noise, options.swaps, options.target, options.looks)
                for seed in range(options.seeds)
            ]
            rows = np.array(compiles)
            sizes = np.exp(rows[:, 0])
            supported, false, tested, items, answered = rows[:, 1:].mean(axis=0)
            print(
                f"{power:5.1f}  {spread:6.1f}  {rows[:, 0].mean():14.4f}  {sizes.std() / sizes.mean():15.3f}  "
                f"{supported:9.3f}  {false:5.3f}  {tested:6.2f}  {items:5.2f}  {answered:8.2f}"
            )


class Simulated(NamedTuple):
    """One search and DRAWS certificates of its plans.

    log_bytes: mean log of the bytes of the bundle.
    supported, false: share of supported certificates, and of those whose plan loses more than the target.
    tested: plans that the certificate tests.
    items: share of the certificate's items that the checkpoint answers.
    answered: plans that answered in the search.
    """

    log_bytes: float
    supported: float
    false: float
    tested: float
    items: float
    answered: int


def simulated(
    seed: int, power: float, spread: float, noise: Noise, swaps: int, target: float, is_early: bool = False
) -> Simulated:
    """Return what one search and its certificates give. is_early: they may end at LOOKS."""
    space = toy_space(toy_model(layers=4, experts=8), seed=seed)
    factors = [3 ** (2 * uniform_number(f"{seed} {row}") - 1) for row in range(space.num_factors)]
    actual = space.rescaled(np.array(factors))
    trials = NoisyTrials(lambda plan: 0.02 * predicted_loss(actual, plan), seed, power, spread, noise)
    wanted, say = Target("loss", target), Swaps(swaps, Talk())
    plans = candidates(space, trials.as_trials(), wanted, lambda _: None, say)
    answered = len({tried.digest for tried in trials.generated})
    counts = [round(look * noise.certified) for look in LOOKS] if is_early else [noise.certified]
    shares = np.array(counts)[:, None] / noise.certified
    draw = np.random.default_rng(seed)
    common, chosen, tested, answers = motion(draw, shares), np.full(DRAWS, -1), np.zeros(DRAWS), np.zeros(DRAWS)
    losses = np.array([trials.true_loss(plan) for plan in plans])
    for place, (plan, level) in enumerate(zip(plans, LEVELS, strict=False)):
        error = noise.at(trials.kl(plan, "true").mean, noise.certified)
        noises = COMMON * common + math.sqrt(1 - COMMON**2) * motion(draw, shares)
        widths = [-NORMAL.inv_cdf(one) for one in look_errors(counts, ERROR * level.share)]
        bounds = losses[place] + error * (noises / shares + np.array(widths)[:, None] / np.sqrt(shares))
        is_supported = bounds <= target
        tested += chosen < 0
        last = np.where(is_supported.any(0), is_supported.argmax(0), len(counts) - 1)
        answers = np.maximum(answers, np.where(chosen < 0, shares[last, 0], 0.0))
        chosen[(chosen < 0) & is_supported.any(0)] = place
    sizes = np.log([plan.expert_packed_bytes + plan.dense_packed_bytes for plan in plans])
    supported = chosen >= 0
    false = supported & (losses[chosen] > target)
    size = float(sizes[np.maximum(chosen, 0)].mean())
    support, errors, tests, items = (float(of.mean()) for of in (supported, false, tested, answers))
    return Simulated(size, support, errors, tests, items, answered)


def motion(draw: np.random.Generator, shares: np.ndarray) -> np.ndarray:
    """Return DRAWS Brownian motions at shares of the items, [looks, DRAWS]."""
    steps = np.sqrt(np.diff(shares, axis=0, prepend=0.0))
    return np.cumsum(steps * draw.standard_normal((len(shares), DRAWS)), axis=0)


class NoisyTrials(ToyTrials):
    """Trials whose losses are 5 times the KL at 0.003 nats, with noise that belongs to the plan."""

    first_kl_per_loss = 0.1

    def __init__(
        self, kl_of: Callable[[CompilePlan], float], seed: int, power: float, spread: float, noise: Noise
    ) -> None:
        super().__init__(kl_of)
        self.certification_items = {"toy": noise.certified}
        self._seed, self._power, self._spread, self._noise = seed, power, spread, noise
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
        error = self._noise.at(self.kl(plan, "true").mean, self._noise.items)
        return {"toy": estimate(self.true_loss(plan) + error * noise, error, self._noise.items)}


if __name__ == "__main__":
    main()
