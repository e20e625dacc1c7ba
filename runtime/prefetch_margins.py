"""How sure a prediction must be before an expert is read ahead, learned from what layers then chose."""

from __future__ import annotations

from collections.abc import Collection
from math import exp, log

import numpy as np

# So often the least sure expert that is read ahead is chosen. On the yardstick at 50 % .7 reads 1.08, .8 1.045 and .9
# 1.02 times what no advice reads; at .8 half of the misses are read ahead (docs/experiments.md, Prefetching).
PRECISION = 0.8
# Of the margin's logarithm, per wrong and right expert next to it.
_RATE = 0.2
_WRONG, _RIGHT = exp(_RATE / 2 * PRECISION), exp(-_RATE / 2 * (1 - PRECISION))
# Where nothing is learned yet; the second layer ahead is guessed half as well as the first.
_FIRST_MARGIN = 0.4
_MOST = log(1e30)


class LearnedMargins:
    """The least logarithm of a score over that of the first expert that would not be chosen, per layer and distance.

    Of a layer's top K the two next to the margin on either side are remembered. Once the layer has chosen, each that
    it did not choose moves the margin up by a share, each that it did down by a smaller one, so that it comes to rest
    where PRECISION of them are chosen: a Robbins-Monro step for that quantile, in proportion because routers differ in
    scale.
    """

    def __init__(self) -> None:
        self._margins: dict[tuple[int, int], float] = {}
        self._nearest: dict[int, list[tuple[int, list[int]]]] = {}

    def margin(self, layer: int, rank: int) -> float:
        """Of a layer that is the rank-th to route behind the one that looks ahead, from 1."""
        return self._margins.get((layer, rank), _FIRST_MARGIN * rank)

    def likely(self, layer: int, rank: int, scores: np.ndarray, top_k: int) -> np.ndarray:
        """Experts that the layer will choose with some certainty, int [n], likeliest first, n <= top_k.

        scores: [E] >= 0; an expert of score 0 is never one of them.
        """
        order = np.argsort(-scores, kind="stable")[: top_k + 1]
        found = scores[order].tolist()
        least = found[top_k] * exp(self.margin(layer, rank)) if len(found) > top_k else 0.0
        count = sum(score >= least and score > 0 for score in found[:top_k])
        nearest = order[max(count - 1, 0) : min(count + 1, top_k)]
        self._nearest.setdefault(layer, []).append((rank, nearest.tolist()))
        return order[:count]

    def observe(self, layer: int, chosen: Collection[int]) -> None:
        """The layer has chosen these experts for the token that its predictions were about."""
        for rank, nearest in self._nearest.pop(layer, ()):
            margin = self.margin(layer, rank)
            for expert in nearest:
                margin *= _RIGHT if expert in chosen else _WRONG
            self._margins[layer, rank] = min(margin, _MOST)

    def forget_guesses(self) -> None:
        """What was predicted will not be compared: another pass comes first."""
        self._nearest.clear()
