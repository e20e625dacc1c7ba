"""How often each bound supports a perplexity whose true loss is the target. Takes a minute.

The rise of the NLL per token differs between texts: log-normal with a spread of `sigma`, plus normal noise.
"""

from __future__ import annotations

import math

import numpy as np
from exact_match import corrected, quantile

RNG = np.random.default_rng(2)
DRAWS, RUNS, TARGET, ERRORS = 4000, 500, 0.02, (0.05, 0.0125)


def drawn_loss(rise: np.ndarray, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.exp((rise * tokens)[chosen].sum(axis=1) / tokens[chosen].sum(axis=1)) - 1


def main() -> None:
    print("texts  sigma  error   percentile  BCa    worst text once more")
    mean = math.log1p(TARGET)
    for items in (30, 60, 200, 500):
        for sigma in (0.3, 0.7, 1.2):
            supported = np.zeros((len(ERRORS), 3))
            for _ in range(RUNS):
                tokens = RNG.integers(100, 400, items).astype(float)
                rise = mean * RNG.lognormal(-(sigma**2) / 2, sigma, items) + RNG.normal(0, 0.5 * mean, items)
                loss = math.expm1(float(rise @ tokens) / tokens.sum())
                influence = rise * tokens - tokens * math.log1p(loss)
                plain = drawn_loss(rise, tokens, RNG.integers(0, items, (DRAWS, items)))
                chosen = RNG.integers(0, items + 1, (DRAWS, items + 1))
                chosen[chosen == items] = int(np.argmax(influence))
                further = drawn_loss(rise, tokens, chosen)
                for at, error in enumerate(ERRORS):
                    bounds = (
                        quantile(plain, 1 - error), corrected(plain, loss, influence, np.ones(items), error),
                        quantile(further, 1 - error),
                    )  # fmt: skip
                    supported[at] += [loss <= TARGET and bound <= TARGET for bound in bounds]
            for error, (percentile, bca, one_more) in zip(ERRORS, supported / RUNS, strict=True):
                print(f"{items:5d}  {sigma:5.1f}  {error:6.4f}  {percentile:10.3f}  {bca:5.3f}  {one_more:.3f}")


if __name__ == "__main__":
    main()
