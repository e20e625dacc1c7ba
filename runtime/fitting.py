"""Fit the weights of the multidimensional policy: a small deterministic search over the simplex. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .options import EvictionWeights

# The first grid has steps of a quarter; each step is halved around the best so far until it is one of these.
UNITS = 32
_FIRST_STEP = UNITS // 4
Point = tuple[int, int, int]


def fit_weights(penalty: Callable[[EvictionWeights], float]) -> tuple[EvictionWeights, float]:
    """The weights of the least penalty that the search finds, and the penalty; penalty must be deterministic.

    Searches recency, uses and nearness in steps of 1/4, then moves 1/8, 1/16 and 1/32 of the weight from one to another
    as long as that helps. Ties: the point that was tried first. Uses at high precision get no weight: with one
    precision they equal uses. At most a few dozen calls.
    """
    known: dict[Point, float] = {}

    def tried(point: Point) -> float:
        if point not in known:
            known[point] = penalty(_weights(point))
        return known[point]

    best = min(_grid(), key=tried)
    step = _FIRST_STEP // 2
    while step:
        nearest = min(_neighbours(best, step), key=tried)
        if tried(nearest) < tried(best):
            best = nearest
        else:
            step //= 2
    return _weights(best), known[best]


def _grid() -> Iterator[Point]:
    steps = UNITS // _FIRST_STEP
    for lru in range(steps + 1):
        for lfu in range(steps + 1 - lru):
            yield lru * _FIRST_STEP, lfu * _FIRST_STEP, (steps - lru - lfu) * _FIRST_STEP


def _neighbours(point: Point, step: int) -> Iterator[Point]:
    """Points that have `step` less of one weight and as much more of another."""
    for taken in range(3):
        for given in range(3):
            if taken != given and point[taken] >= step:
                moved = list(point)
                moved[taken] -= step
                moved[given] += step
                yield moved[0], moved[1], moved[2]


def _weights(point: Point) -> EvictionWeights:
    lru, lfu, fld = (part / UNITS for part in point)
    return EvictionWeights(lru, lfu, 0.0, fld)
