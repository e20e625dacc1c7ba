"""Fit the weights of HOBBIT's score by a small deterministic search. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

from ..options.runtime import EvictionWeights

# Weights are multiples of 1 / UNITS. The first grid has steps of 1/4; the step is halved until it is one unit.
UNITS = 32
_FIRST_STEP = UNITS // 4
Point = tuple[int, int, int, int]
"""Units of recency, uses, uses at high precision and nearness; their sum is UNITS."""


def fit_weights(
    penalty: Callable[[EvictionWeights], float], has_low_versions: bool = False
) -> tuple[EvictionWeights, float]:
    """Return the weights with the smallest penalty that the search visits, and this penalty.

    The search tries recency, uses and nearness in steps of 1/4. Then it moves 1/8, 1/16 and 1/32 from one weight to
    another as long as the penalty falls. On ties the first tried point is taken. It makes at most a few dozen calls.
    penalty: must be deterministic.
    has_low_versions: also search the weight of uses at high precision, which takes two or three times the calls. If
        experts have one precision, these uses equal all uses.
    """
    known: dict[Point, float] = {}

    def tried(point: Point) -> float:
        if point not in known:
            known[point] = penalty(_weights(point))
        return known[point]

    best = min(_grid(has_low_versions), key=tried)
    step = _FIRST_STEP // 2
    while step:
        neighbours = list[Point]()  # `step` units move from one weight to another
        for taken, given in permutations((0, 1, 2, 3) if has_low_versions else (0, 1, 3), 2):
            if best[taken] >= step:
                moved = list(best)
                moved[taken] -= step
                moved[given] += step
                neighbours.append((moved[0], moved[1], moved[2], moved[3]))
        nearest = min(neighbours, key=tried)
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


def _weights(point: Point) -> EvictionWeights:
    lru, lfu, lhu, fld = (units / UNITS for units in point)
    return EvictionWeights(lru, lfu, lhu, fld)
