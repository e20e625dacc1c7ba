"""Eviction policies: pure functions from what is known of the experts to a keep-score; the lowest goes first.

Index i counts the experts of the manifest in order. Ties fall to the least recently used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .options import Policy


@dataclass(slots=True)
class ExpertRecords:
    """Per expert: layer int32, calibration frequency float64 (share of its layer's tokens), last use and uses int64.

    Arrays are [N]; last_used counts acquisitions of the cache, 0 is never.
    """

    layer: np.ndarray
    frequency: np.ndarray
    last_used: np.ndarray
    uses: np.ndarray
    num_layers: int

    def layer_distance(self, running_layer: int) -> np.ndarray:
        """How many MoE layers ahead each expert's layer runs next: 1 for the next layer, L for the running one.

        d = ((l - I - 1) mod L) + 1. Source: EdgeMoE, expert buffer management; the printed modulus is the other way
        round and contradicts the text around it.
        """
        distance: np.ndarray = (self.layer - running_layer - 1) % self.num_layers + 1
        return distance


def expert_records(layer: np.ndarray, popularity: np.ndarray, num_layers: int) -> ExpertRecords:
    """Records of experts that nothing has used yet. layer: int [N]; popularity: counts [N] over the same experts.

    A layer whose counts are all zero gives frequency 0 to all of its experts.
    """
    totals = np.maximum(np.bincount(layer, weights=popularity, minlength=num_layers), 1)
    unused = np.zeros(len(layer), np.int64)
    return ExpertRecords(layer.astype(np.int32), popularity / totals[layer], unused, unused.copy(), num_layers)


def warm_order(records: ExpertRecords) -> np.ndarray:
    """Expert indices in the order of the initial fill: what calibration saw most often first. Source: EdgeMoE."""
    return np.lexsort((np.arange(len(records.layer)), -records.frequency))


PolicyScore = Callable[[ExpertRecords, int], np.ndarray]


def edgemoe_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """f[l, e] / d(l): rarely used and far away goes first. Source: EdgeMoE, expert buffer management."""
    score: np.ndarray = records.frequency / records.layer_distance(running_layer)
    return score


def lru_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """Least recently used goes first."""
    return records.last_used.astype(np.float64)


def lfu_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """Least often used in this process goes first."""
    return records.uses.astype(np.float64)


SCORES: dict[Policy, PolicyScore] = {"edgemoe": edgemoe_score, "lru": lru_score, "lfu": lfu_score}


def eviction_order(
    records: ExpertRecords, score: PolicyScore, running_layer: int, candidates: np.ndarray
) -> np.ndarray:
    """Candidates (int indices), first to evict first; ties by least recent use, then by index."""
    scores = score(records, running_layer)[candidates]
    return candidates[np.lexsort((candidates, records.last_used[candidates], scores))]
