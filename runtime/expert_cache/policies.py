"""Eviction policies: pure functions from the records of the experts to a score. The lowest score is evicted first.

Index i is the i-th expert of the manifest. On ties the least recently used expert is evicted first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from ..options.runtime import EvictionWeights, Policy, parse_weights
from .records import ExpertRecords

# Weights of `hobbit` without a fit: those fitted to the example with 75 % of its experts in memory. Bytes read on
# held-out texts, as a share of the best of LRU, LFU and EdgeMoE
# (docs/experiments/2026-11.md, 21: HOBBIT's eviction score):
# - 10 % of the experts in memory: 0.997
# - 25 %: 0.983
# - 50 %: 0.967
# - 75 %: 0.939
DEFAULT_WEIGHTS = EvictionWeights(lru=0.0625, lfu=0.75, lhu=0.0, fld=0.1875)


PolicyScore = Callable[[ExpertRecords, int], np.ndarray]


def edgemoe_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """f[l, e] / d(l): a rarely used expert of a distant layer is evicted first.

    Source: EdgeMoE, expert buffer management.
    """
    score: np.ndarray = records.frequency / records.layer_distance(running_layer)
    return score


def lru_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """The least recently used expert is evicted first."""
    return records.last_used.astype(np.float64)


def lfu_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """The expert with the fewest uses in this process is evicted first."""
    return records.uses.astype(np.float64)


def lrfu_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """Least recently and frequently used: the heat. The ranking by heat does not change with time.

    If the experts of a pass do not fit in the cache, the weighted uses are divided by the distance of the layer, as in
    `edgemoe_score`. Otherwise each pass would evict what the next one needs first.
    Source: Lee et al., LRFU: A Spectrum of Policies that Subsumes the LRU and LFU Policies, section 3.
    """
    if records.fits_pass:
        return records.heat
    score: np.ndarray = records.heat - records.log2_distance(running_layer)[records.layer]
    return score


@dataclass(frozen=True, slots=True)
class MultidimensionalScore:
    """w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - (d - 1)/L), all within the sequence.

    T: passes so far; in decoding, tokens.
    R: the pass that used this version last.
    F: uses of the expert in any version.
    H: uses of its high version. It equals F if experts have one version. Then w_lhu adds to w_lfu.
    d: distance of its layer, `layer_distance`.

    as_printed: use (l - I) mod L instead of d - 1, for comparison. This protects unused experts of the running layer
        most, although they run last.
    Source: HOBBIT, sequence-level multidimensional cache management.
    """

    weights: EvictionWeights
    as_printed: bool = False

    def __call__(self, records: ExpertRecords, running_layer: int) -> np.ndarray:
        weights, passes = self.weights, records.sequence_passes
        score: np.ndarray = weights.lru / passes * records.last_passes()
        score += weights.lfu / passes * records.sequence_uses()
        if weights.lhu:
            score += weights.lhu / passes * records.high_precision_uses()
        # The printed form has the distances of the layer before.
        nearness = records.layer_nearness((running_layer - self.as_printed) % records.num_layers)
        score += (weights.fld * nearness)[records.layer]
        return score


SCORES: dict[Policy, PolicyScore] = {
    "lrfu": lrfu_score,
    "edgemoe": edgemoe_score,
    "lru": lru_score,
    "lfu": lfu_score,
    "hobbit": MultidimensionalScore(DEFAULT_WEIGHTS),
    "hobbit-printed": MultidimensionalScore(DEFAULT_WEIGHTS, as_printed=True),
}


def policy_score(policy: str, weights: str | None = None) -> PolicyScore:
    """Return the score of a policy.

    weights: weights of HOBBIT's score as text; None for the default.
    Raises OptionError.
    """
    if weights is None:
        return SCORES[cast(Policy, policy)]
    return MultidimensionalScore(parse_weights(weights), as_printed=policy == "hobbit-printed")
