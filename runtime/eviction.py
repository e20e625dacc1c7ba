"""Eviction policies: pure functions from what is known of the experts to a keep-score; the lowest goes first.

Index i counts the experts of the manifest in order. Ties fall to the least recently used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .options import Policy

# After so many tokens a use counts half. Misses on 600 tokens of the yardstick, 50 % of the experts: 8 tokens 22,905,
# 32 20,920, 64 20,700, 128 20,739; LRU 26,132, LFU 20,842 (docs/experiments.md, Eviction).
HALF_LIFE_TOKENS = 64


@dataclass(slots=True)
class ExpertRecords:
    """Per expert: layer int32, calibration frequency float64 (share of its layer's tokens), last use, uses, heat.

    Arrays are [N]; last_used, int64, counts acquisitions of the cache, 0 is never; uses, int64. heat, float64: the uses
    so far, each halved for every HALF_LIFE_TOKENS up to the last one; it starts with what calibration saw.
    encoder_layers: so many of the layers, the first, are an encoder's.
    """

    layer: np.ndarray
    frequency: np.ndarray
    last_used: np.ndarray
    uses: np.ndarray
    heat: np.ndarray
    num_layers: int
    encoder_layers: int = 0

    def use(self, indices: Sequence[int], clock: int) -> None:
        """Count one use of each at this acquisition of the cache."""
        which = np.array(indices, np.intp)
        age = clock - self.last_used[which]
        self.heat[which] = self.heat[which] * np.exp2(-age / self.half_life) + 1
        self.last_used[which] = clock
        self.uses[which] += 1

    @property
    def half_life(self) -> int:
        """In acquisitions: one per layer and token."""
        return HALF_LIFE_TOKENS * self.num_layers

    def unused(self) -> ExpertRecords:
        """The same experts before the first use."""
        return _unused(self.layer, self.frequency, self.num_layers, self.encoder_layers)

    def turn(self, running_layer: int) -> np.ndarray:
        """What goes first whatever the policy, int [N]: 0 an encoder's layer that is over, of no use before the next
        prompt; 1 one that is still to come, which can be read ahead in order; 2 the decoder's, which every token needs.

        Source: EdgeMoE, expert buffer management: the encoder's experts go first (docs/experiments.md, Eviction with an
        encoder).
        """
        is_ahead = self.layer > running_layer
        return np.where(self.layer < self.encoder_layers, np.where(is_ahead, 1, 0), 2)

    def layer_distance(self, running_layer: int) -> np.ndarray:
        """How many MoE layers ahead each expert's layer runs next: 1 for the next layer, L for the running one.

        d = ((l - I - 1) mod L) + 1, L without the encoder's. Source: EdgeMoE, expert buffer management; the printed
        modulus is the other way round and contradicts the text around it.
        """
        layers = self.num_layers - self.encoder_layers
        distance: np.ndarray = (self.layer - max(running_layer, self.encoder_layers - 1) - 1) % layers + 1
        return distance


def expert_records(
    layer: np.ndarray, popularity: np.ndarray, num_layers: int, encoder_layers: int = 0
) -> ExpertRecords:
    """Records of experts that nothing has used yet. layer: int [N]; popularity: counts [N] over the same experts.

    A layer whose counts are all zero gives frequency 0 to all of its experts.
    """
    totals = np.maximum(np.bincount(layer, weights=popularity, minlength=num_layers), 1)
    return _unused(layer.astype(np.int32), popularity / totals[layer], num_layers, encoder_layers)


def _unused(layer: np.ndarray, frequency: np.ndarray, num_layers: int, encoder_layers: int) -> ExpertRecords:
    """Heat as if each of the last HALF_LIFE_TOKENS tokens had used one expert of a layer, as calibration saw it."""
    zeros = np.zeros(len(layer), np.int64)
    heat = frequency * HALF_LIFE_TOKENS
    return ExpertRecords(layer, frequency, zeros, zeros.copy(), heat, num_layers, encoder_layers)


def warm_order(records: ExpertRecords) -> np.ndarray:
    """Expert indices in the order of the initial fill: what calibration saw most often first; before that an encoder,
    layer by layer, as it runs. Source: EdgeMoE.
    """
    encoder = np.minimum(records.layer, records.encoder_layers)
    return np.lexsort((np.arange(len(records.layer)), -records.frequency, encoder))


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


def lrfu_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """Least recently and frequently used: the heat of today, as its logarithm plus a constant that is the same for all.

    Source: Lee et al., LRFU: A Spectrum of Policies that Subsumes the LRU and LFU Policies, section 3.
    """
    with np.errstate(divide="ignore"):  # never seen: the first to go
        score: np.ndarray = np.log2(records.heat) + records.last_used / records.half_life
    return score


SCORES: dict[Policy, PolicyScore] = {
    "lrfu": lrfu_score,
    "edgemoe": edgemoe_score,
    "lru": lru_score,
    "lfu": lfu_score,
}


def eviction_order(
    records: ExpertRecords, score: PolicyScore, running_layer: int, candidates: np.ndarray
) -> np.ndarray:
    """Candidates (int indices), first to evict first; ties by least recent use, then by index.

    An encoder's turn comes before every score (ExpertRecords.turn).
    """
    scores, turns = score(records, running_layer)[candidates], records.turn(running_layer)[candidates]
    return candidates[np.lexsort((candidates, records.last_used[candidates], scores, turns))]
