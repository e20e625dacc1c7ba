"""Looks of a certificate: the items that each adds, and the error that each may make.

A certificate with several looks is a group-sequential test. Up to a share t of the items it spends error x t^3. The
last look keeps nearly the whole error, and only a clear case ends early. The looks see the same items, so their
statistics are correlated: the errors come from the distribution of a Brownian motion at the looks.
Source: Lan and DeMets, Discrete sequential boundaries for clinical trials, 1983; Kim and DeMets, 1987 (the power of t);
Armitage, McPherson and Rowe, Repeated significance tests on accumulating data, 1969 (the recursion).
Measured: docs/experiments/2026-11.md, 30: Looks of a certificate.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from moec.evaluation.data import ItemSet

LOOKS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the items, at which a certificate may end."""
LEAST_ITEMS = 250
"""Fewest items of an early look."""
_SPENDING_POWER = 3
_STEP, _LARGEST = 0.002, 8.0
"""Grid of the Brownian motion, in standard deviations of its end."""


def look_positions(items: ItemSet, is_early: bool) -> list[list[int]]:
    """Return the positions of the items that each look adds. The last look is at all items.

    A file may be sorted by subject. So an early look is at a sample, and never at the first items of the file.
    is_early: there are looks before the last item.
    """
    if not is_early:
        return [list(range(len(items)))]
    counts = [count for look in LOOKS[:-1] if (count := round(look * len(items))) >= LEAST_ITEMS]
    order = items.order()
    return [sorted(order[before:count]) for before, count in itertools.pairwise([0, *counts, len(items)])]


def look_errors(counts: Sequence[int], error: float) -> list[float]:
    """Return the one-sided error of each look. A test that stops at the first look that decides errs in `error`.

    counts: number of items at each look, rising.
    """
    if len(counts) == 1:
        return [error]
    return list(_errors(tuple(count / counts[-1] for count in counts), error))


@cache
def _errors(shares: tuple[float, ...], error: float) -> tuple[float, ...]:
    """Return the nominal error of each look.

    The motion has a variance of t after a share t of the items. `density` is that of its values that no look has
    ended. A look ends those above a bound, whose probability is what the look may spend.
    """
    values = np.arange(-_LARGEST, _LARGEST + _STEP / 2, _STEP)
    normal, nominal, before, density = NormalDist(), list[float](), 0.0, np.empty(0)
    for share in shares:
        variance = share - before
        kernel = np.exp(-(values**2) / (2 * variance)) / np.sqrt(2 * np.pi * variance) * _STEP
        density = kernel if not nominal else np.convolve(density, kernel, "same")
        above = density[::-1].cumsum()[::-1]
        spent = error * (share**_SPENDING_POWER - before**_SPENDING_POWER)
        bound = float(np.interp(spent, above[::-1], values[::-1]))
        density = np.where(values < bound, density, 0.0)
        nominal.append(round(1 - normal.cdf(bound / np.sqrt(share)), 8))
        before = share
    return tuple(nominal)
