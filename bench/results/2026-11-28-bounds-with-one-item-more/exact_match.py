"""How often each bound supports an exact match whose true loss is the target. Takes a minute."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

NORMAL, RNG = NormalDist(), np.random.default_rng(1)
DRAWS, RUNS, TARGET, ERRORS = 4000, 1000, 0.02, (0.05, 0.0125, 0.003)
# baseline, items, share of items that the bundle alone solves
CASES = (
    (0.95, 160, 0.0), (0.95, 500, 0.0), (0.95, 500, 0.01), (0.95, 2000, 0.01), (0.95, 4000, 0.01), (0.75, 500, 0.0),
    (0.75, 500, 0.02), (0.75, 2000, 0.02), (0.5, 300, 0.0), (0.5, 300, 0.01), (0.5, 1000, 0.02), (0.5, 4000, 0.05),
)  # fmt: skip


def quantile(draws: np.ndarray, share: float) -> float:
    at = max(0, math.ceil(share * len(draws)) - 1)
    return float(np.partition(draws, at)[at])


def losses(counts: np.ndarray, further: int) -> np.ndarray:
    """Losses of draws of the items, and of one further item that loses everything. counts: lost, won, right, wrong."""
    items = counts.sum()
    shares = np.array([*counts, *([1] if further else [])]) / (items + further)
    drawn = RNG.multinomial(items + further, shares, size=DRAWS).astype(float)
    before, after = drawn[:, 0] + drawn[:, 2], drawn[:, 1] + drawn[:, 2]
    if further:
        baseline = (counts[0] + counts[2]) / items
        before, after = before + drawn[:, 4] * baseline, after + drawn[:, 4] * (baseline - 1)
    with np.errstate(all="ignore"):
        return np.where(before > 0, (before - after) / before, np.inf)


def corrected(draws: np.ndarray, loss: float, influence: np.ndarray, counts: np.ndarray, error: float) -> float:
    """The upper bound of BCa."""
    cubes, squares = float(counts @ influence**3), float(counts @ influence**2)
    skew = cubes / (6 * squares**1.5) if squares > 0 else 0.0
    below = float(np.mean(draws < loss) + np.mean(draws == loss) / 2)
    bias = NORMAL.inv_cdf(min(max(below, 1 / DRAWS), 1 - 1 / DRAWS))
    shifted = bias + NORMAL.inv_cdf(1 - error)
    return quantile(draws, NORMAL.cdf(bias + shifted / max(1 - skew * shifted, 0.1)))


def main() -> None:
    print("baseline  items  won   error   percentile  BCa    one item more")
    for baseline, items, won in CASES:
        lost = TARGET * baseline + won
        rates = [lost, won, baseline - lost, 1 - baseline - won]
        supported = np.zeros((len(ERRORS), 3))
        for counts in RNG.multinomial(items, rates, size=RUNS):
            before, after = (counts[0] + counts[2]) / items, (counts[1] + counts[2]) / items
            loss = (before - after) / before
            plain, further = losses(counts, 0), losses(counts, 1)
            influence = np.array([1, 0, 1, 0]) * after / before - np.array([0, 1, 1, 0])
            for at, error in enumerate(ERRORS):
                enough = items >= max(30, math.ceil(math.log(error) / math.log1p(-TARGET * before)))
                bounds = (
                    quantile(plain, 1 - error), corrected(plain, loss, influence, counts, error),
                    quantile(further, 1 - error),
                )  # fmt: skip
                supported[at] += [enough and loss <= TARGET and bound <= TARGET for bound in bounds]
        for error, (percentile, bca, one_more) in zip(ERRORS, supported / RUNS, strict=True):
            shares = f"{percentile:10.3f}  {bca:5.3f}  {one_more:.3f}"
            print(f"{baseline:8.2f}  {items:5d}  {won:4.2f}  {error:6.4f}  {shares}")


if __name__ == "__main__":
    main()
