"""Fit the weights of the multidimensional policy: a small deterministic search over the simplex. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

from ..options.runtime import EvictionWeights

# The first grid has steps of a quarter; each step is halved around the best so far until it is one of these.
UNITS = 32
_FIRST_STEP = UNITS // 4
Point = tuple[int, int, int, int]
"""Units of recency, uses, uses at high precision, nearness."""


def fit_weights(
    penalty: Callable[[EvictionWeights], float], has_low_versions: bool = False
) -> tuple[EvictionWeights, float]:
    """The weights of the least penalty that the search finds, and the penalty; penalty must be deterministic.

    Searches recency, uses and nearness in steps of 1/4, then moves 1/8, 1/16 and 1/32 of the weight from one to another
    as long as that helps. Ties: the point that was tried first. At most a few dozen calls.
    has_low_versions: search uses at high precision as well, two or three times the calls; with one precision they
    equal uses.
    """
    known: dict[Point, float] = {}

    def tried(point: Point) -> float:
        if point not in known:
            known[point] = penalty(_weights(point))
        return known[point]

    best = min(_grid(has_low_versions), key=tried)
    step = _FIRST_STEP // 2
    while step:
        nearest = min(_neighbours(best, step, has_low_versions), key=tried)
        if tried(nearest) < tried(best):
            best = nearest
        else:
            step //= 2
    return _weights(best), known[best]


def _grid(has_low_versions: bool) -> Iterator[Point]:
    steps = UNITS // _FIRST_STEP
    for lru in range(steps + 1):
        for lfu in range(steps + 1 - lru):
            for lhu in range(steps + 1 - lru - lfu) if has_low_versions else (0,):
                yield lru * _FIRST_STEP, lfu * _FIRST_STEP, lhu * _FIRST_STEP, (steps - lru - lfu - lhu) * _FIRST_STEP


def _neighbours(point: Point, step: int, has_low_versions: bool) -> Iterator[Point]:
    """Points that have `step` less of one weight and as much more of another."""
    for taken, given in permutations((0, 1, 2, 3) if has_low_versions else (0, 1, 3), 2):
        if point[taken] >= step:
            moved = list(point)
            moved[taken] -= step
            moved[given] += step
            yield moved[0], moved[1], moved[2], moved[3]


def _weights(point: Point) -> EvictionWeights:
    lru, lfu, lhu, fld = (part / UNITS for part in point)
    return EvictionWeights(lru, lfu, lhu, fld)
