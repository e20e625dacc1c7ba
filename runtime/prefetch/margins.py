"""How sure a prediction must be before an expert is read ahead, learned from what layers then chose."""

from __future__ import annotations

from collections.abc import Collection
from math import exp, log

import numpy as np

from .. import kernels

# So often the least sure expert that is read ahead is chosen. On the yardstick at 50 % .7 reads 1.08, .8 1.045 and .9
# 1.02 times what no advice reads; at .8 half of the misses are read ahead (docs/experiments.md, Prefetching).
PRECISION = 0.8
# Of the margin's logarithm, per wrong and right expert next to it.
_RATE = 0.2
_WRONG, _RIGHT = exp(_RATE / 2 * PRECISION), exp(-_RATE / 2 * (1 - PRECISION))
# Where nothing is learned yet; the second layer ahead is guessed half as well as the first.
_FIRST_MARGIN = 0.4
# Bounds, so that what was learned can be unlearned within some hundred tokens.
_LEAST, _MOST = 0.01, log(1e15)
# Of the largest score: what stands for the score of one that would not be chosen where that is less, or 0.
_FLOOR = 1e-9

RULES = {
    "wrong": _WRONG,
    "right": _RIGHT,
    "first": _FIRST_MARGIN,
    "least": _LEAST,
    "most": _MOST,
    "floor": _FLOOR,
}
"""What the extension learns by."""


class LearnedMargins:
    """The least logarithm of a score over that of the first expert that would not be chosen, before one is read ahead.

    Learned apart for every pair of a layer that looks ahead and a layer that it looks at: another pair has another
    predictor, or sees less. Of the top K the two next to the margin on either side are remembered. Once the layer has
    chosen, each that it did not choose moves the margin up by a share, each that it did down by a smaller one, so that
    it comes to rest where PRECISION of them are chosen: a Robbins-Monro step for that quantile, in proportion because
    routers differ in scale.
    """

    def __init__(self) -> None:
        self._margins: dict[tuple[int, int], float] = {}
        self._nearest: dict[int, list[tuple[int, float, list[int]]]] = {}

    def margin(self, running: int, layer: int, rank: int) -> float:
        """Of a layer that is the rank-th to route behind the running one, from 1."""
        return self._margins.get((running, layer), _FIRST_MARGIN * rank)

    def likely(self, running: int, layer: int, rank: int, scores: np.ndarray, top_k: int) -> list[int]:
        """Experts that the layer will choose with some certainty, likeliest first, top_k at most.

        scores: [E] >= 0; an expert of score 0 is never one of them.
        """
        order, found = kernels.largest(scores, top_k + 1)
        margin = self.margin(running, layer, rank)
        least = max(found[top_k], found[0] * _FLOOR) * exp(margin) if len(found) > top_k else 0.0
        count = sum(score >= least and score > 0 for score in found[:top_k])
        nearest = order[max(count - 1, 0) : min(count + 1, top_k)]
        self._nearest.setdefault(layer, []).append((running, margin, nearest))
        return order[:count]

    def observe(self, layer: int, chosen: Collection[int]) -> None:
        """The layer has chosen these experts for the token that its predictions were about."""
        for running, margin, nearest in self._nearest.pop(layer, ()):
            moved = margin
            for expert in nearest:
                moved *= _RIGHT if expert in chosen else _WRONG
            self._margins[running, layer] = min(max(moved, _LEAST), _MOST)

    def forget_guesses(self) -> None:
        """What was predicted will not be compared: another pass comes first."""
        self._nearest.clear()
