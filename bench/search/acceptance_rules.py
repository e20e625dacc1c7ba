"""Rules by which a search accepts a plan, compared by simulation.

    python -m bench.search.acceptance_rules [--repeats N]

Takes a minute. Prints Markdown tables.

A plan of b bits per weight has the loss 0.0143 * 2^((6.7 - b) / 0.76). Texts differ: the loss of one text is that loss
plus a deviation of 0.25 * sqrt(loss), with the tails of a t distribution with 5 degrees of freedom. Deviations of two
plans have the correlation 2^-|difference in doublings of the loss|. The three numbers come from plans of
SmolLM2-135M-Instruct with experts. At 6.7 bits, 160 texts lost 1.46 %, with a standard error of 0.225 %. From 2.9 to
6.56 bits, KL fell by a factor of 28.

Each simulated search bisects over bits with validation texts, and takes the smallest accepted plan. Its certificate is
supported if the one-sided 95 % bound on test texts is at most the target. For each rule the tables show how often it
is supported, and how many bits the plan has above the ideal one, whose loss is the target.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from moec.evaluation.statistics import ONE_SIDED_95

AT_BITS, AT_LOSS, BITS_PER_HALVING = 6.7, 0.0143, 0.76
DEVIATION = 0.25
FREEDOM = 5
GRID = np.arange(2.0, 16.0, 0.1)
STEPS = 7
Rule = Callable[[float, float, float], float]
"""Upper bound of a loss, from the loss, its standard error, and that of the certificate."""


def predictive(normal_quantile: float) -> Rule:
    """Return the rule whose certificate is supported with the probability of this normal quantile."""

    def bound(loss: float, own: float, at_test: float) -> float:
        return loss + ONE_SIDED_95 * at_test + normal_quantile * math.hypot(own, at_test)

    return bound


RULES: dict[str, Rule] = {
    "loss": lambda loss, own, at_test: loss,
    "loss + 1 standard error": lambda loss, own, at_test: loss + own,
    "one-sided 95 % bound": lambda loss, own, at_test: loss + ONE_SIDED_95 * own,
    "1 standard error + 1.645 of the certificate": lambda loss, own, at_test: loss + own + ONE_SIDED_95 * at_test,
    "predictive, 50 %": predictive(0.0),
    "predictive, 80 %": predictive(0.842),
    "predictive, 90 %": predictive(1.2816),
}


def losses() -> np.ndarray:
    """Return the true loss of every plan of the grid."""
    return np.asarray(AT_LOSS * 2.0 ** ((AT_BITS - GRID) / BITS_PER_HALVING))


def correlation_root() -> np.ndarray:
    """Return a root of the correlation of deviations between plans, [P, P]."""
    doublings = GRID / BITS_PER_HALVING
    correlation = 2.0 ** -np.abs(doublings[:, None] - doublings[None, :])
    return np.asarray(np.linalg.cholesky(correlation + 1e-9 * np.eye(len(GRID))))


def measured(texts: int, draw: np.random.Generator, root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean loss and standard error of every plan, [P] each, on newly drawn texts."""
    scale = np.sqrt(FREEDOM / draw.chisquare(FREEDOM, (texts, 1)) * (FREEDOM - 2) / FREEDOM)
    deviations = draw.standard_normal((texts, len(GRID))) @ root.T * scale
    at_search = losses() + DEVIATION * np.sqrt(losses()) * deviations
    return at_search.mean(0), at_search.std(0, ddof=1) / math.sqrt(texts)


def searched(rule: Rule, found: tuple[np.ndarray, np.ndarray], share: float, target: float) -> int | None:
    """Return the index of the smallest plan that a bisection accepts, or None.

    found: loss and standard error of every plan.
    share: expected standard error of the certificate over that of the search.
    """
    low, high, accepted = 0, len(GRID) - 1, None
    for _ in range(STEPS):
        at = (low + high) // 2
        loss, error = found[0][at], found[1][at]
        if rule(loss, error, error * share) <= target:
            accepted, high = at, at - 1
        else:
            low = at + 1
        if low > high:
            break
    return accepted


def simulate(texts: int, test_texts: int, target: float, repeats: int) -> dict[str, tuple[float, float, float]]:
    """Return for each rule the shares of supported and of absent plans, and the mean of the bits above the ideal."""
    draw, root = np.random.default_rng(0), correlation_root()
    ideal = AT_BITS - BITS_PER_HALVING * math.log2(target / AT_LOSS)
    supported, missing, extra = (dict.fromkeys(RULES, 0.0) for _ in range(3))
    for _ in range(repeats):
        own, held_out = measured(texts, draw, root), measured(test_texts, draw, root)
        for name, rule in RULES.items():
            plan = searched(rule, own, math.sqrt(texts / test_texts), target)
            if plan is None:
                missing[name] += 1
                continue
            supported[name] += held_out[0][plan] + ONE_SIDED_95 * held_out[1][plan] <= target
            extra[name] += GRID[plan] - ideal
    return {
        name: (supported[name] / repeats, missing[name] / repeats, extra[name] / max(repeats - missing[name], 1))
        for name in RULES
    }


def main() -> None:
    """Read the command line, simulate and print."""
    parser = argparse.ArgumentParser(description="Acceptance rules by simulation.")
    parser.add_argument("--repeats", type=int, default=1000)
    options = parser.parse_args()
    for target in (0.02, 0.05):
        for texts, test_texts in ((40, 160), (200, 200), (500, 500), (500, 2500)):
            print(f"\nTarget {target:.0%}, {texts} validation and {test_texts} test texts:\n")
            print("| rule | supported | no plan | bits above the ideal |\n|---|---|---|---|")
            for name, row in simulate(texts, test_texts, target, options.repeats).items():
                print(f"| {name} | {row[0]:.1%} | {row[1]:.1%} | {row[2]:+.2f} |")


if __name__ == "__main__":
    main()
