"""Learn how certain a prediction must be before an expert is read ahead, from the choices of the layers."""

from __future__ import annotations

from collections.abc import Collection
from math import exp, log

import numpy as np

from .. import kernels

# Share of cases in which the least certain expert that is read ahead is chosen. At 0.8 half of the misses are read
# ahead (docs/experiments/2026-11.md, 22: Prefetch what is sure enough). Bytes read with the benchmark model (shape of
# OLMoE-1B-7B) and 50 % of the experts cached, as a multiple of a run without advice:
# - 0.7: 1.08
# - 0.8: 1.045
# - 0.9: 1.02
PRECISION = 0.8
# Change of a threshold's logarithm for each wrong and right expert next to the threshold.
_RATE = 0.2
_WRONG, _RIGHT = exp(_RATE / 2 * PRECISION), exp(-_RATE / 2 * (1 - PRECISION))
# Threshold before anything is learned, as a share of the margin of the best expert: ratios of sigmoid scores are a
# third of those of softmax. Predictions of the second layer ahead are half as good as those of the first.
_FIRST_SHARE = 0.3
# Bounds of a threshold, so that it can be unlearned within some hundred tokens.
_LEAST, _MOST = 0.01, log(1e15)
# Share of the largest score that replaces the score of the first expert that would not be chosen, if that is less.
_FLOOR = 1e-9

RULES = {
    "wrong": _WRONG,
    "right": _RIGHT,
    "first": _FIRST_SHARE,
    "least": _LEAST,
    "most": _MOST,
    "floor": _FLOOR,
}
"""Constants of the rule, for the extension."""


class LearnedThresholds:
    """Thresholds of the margin from which experts are read ahead.

    The margin of an expert is the logarithm of its score over the score of the first expert that would not be chosen.
    An expert is read ahead if its margin reaches the threshold.
    There is a threshold for each pair of running and predicted layer. Each pair has another predictor or another input.

    Of the top K experts, the last one above the threshold and the first one below it are remembered. When the layer has
    chosen, each of them that it did not choose raises the threshold. Each one that it chose lowers the threshold by a
    smaller factor. The threshold settles where PRECISION of them are chosen. This is a Robbins-Monro step for that
    quantile. It is proportional because routers differ in scale.
    """

    def __init__(self) -> None:
        self._thresholds: dict[tuple[int, int], float] = {}
        self._nearest: dict[int, list[tuple[int, float, list[int]]]] = {}

    def threshold(self, running: int, layer: int) -> float:
        """Return the threshold of a predicted layer, 0 before its first prediction."""
        return self._thresholds.get((running, layer), 0.0)

    def likely(self, running: int, layer: int, rank: int, scores: np.ndarray, top_k: int) -> list[int]:
        """Return experts that the layer will choose with enough certainty, likeliest first, at most top_k.

        rank: the predicted layer is the rank-th to route after the running one, from 1.
        scores: [E], not negative. An expert of score 0 is never returned.
        """
        order, largest = kernels.largest(scores, top_k + 1)
        next_best = max(largest[top_k], largest[0] * _FLOOR) if len(largest) > top_k else 0.0
        pair = (running, layer)
        if pair not in self._thresholds and next_best > 0:
            self._thresholds[pair] = min(max(_FIRST_SHARE * rank * log(largest[0] / next_best), _LEAST), _MOST)
        threshold = self.threshold(*pair)
        least = next_best * exp(threshold)
        count = sum(score >= least and score > 0 for score in largest[:top_k])
        nearest = order[max(count - 1, 0) : min(count + 1, top_k)]
        self._nearest.setdefault(layer, []).append((running, threshold, nearest))
        return order[:count]

    def observe(self, layer: int, chosen: Collection[int]) -> None:
        """Learn from the experts that a layer has chosen for the token of its predictions."""
        for running, threshold, nearest in self._nearest.pop(layer, ()):
            moved = threshold
            for expert in nearest:
                moved *= _RIGHT if expert in chosen else _WRONG
            self._thresholds[running, layer] = min(max(moved, _LEAST), _MOST)

    def forget_guesses(self) -> None:
        """Drop the predictions that no choice will be compared with, because another pass comes first."""
        self._nearest.clear()
