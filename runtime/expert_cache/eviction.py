"""Eviction policies: pure functions from what is known of the experts to a keep-score; the lowest goes first.

Index i counts the experts of the manifest in order. Ties fall to the least recently used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from ..options.runtime import EvictionWeights, Policy, parse_weights

if TYPE_CHECKING:
    from moec.manifests.bundle import ExpertEntry

    from ..bundle.opening import Bundle
    from ..bundle.tables import Tables

# After so many tokens a use counts half. Misses on 600 tokens of the yardstick, 50 % of the experts: 8 tokens 22,905,
# 32 20,920, 64 20,700, 128 20,739; LRU 26,132, LFU 20,842
# (docs/experiments/2026-11-21-eviction-half-life.md).
HALF_LIFE_TOKENS = 64
# Of `hobbit` where nothing was fitted: those of the example at 75 % of its experts. On held-out texts they read .997,
# .983, .967 and .939 of the best of LRU, LFU and EdgeMoE at 10, 25, 50 and 75 %
# (docs/experiments/2026-11-21-hobbit-eviction-on-the-example.md).
DEFAULT_WEIGHTS = EvictionWeights(lru=0.0625, lfu=0.75, lhu=0.0, fld=0.1875)


@dataclass(slots=True)
class ExpertRecords:
    """Per expert: layer int32, calibration frequency float64 (share of its layer's tokens), last use, uses, heat.

    Arrays are [N]; last_used, int64, counts acquisitions of the cache, 0 is never; uses, int64. heat, float64: to the
    base 2 the logarithm of the uses so far, each worth twice one that came HALF_LIFE_TOKENS before it; it starts with
    what calibration saw.
    encoder_layers: so many of the layers, the first, are an encoder's.
    expert: int [N], the index of the high version of each; None where experts have one version.
    clock: acquisitions so far. What counts within a sequence counts from the last `begin_sequence`.
    """

    layer: np.ndarray
    frequency: np.ndarray
    last_used: np.ndarray
    uses: np.ndarray
    heat: np.ndarray
    num_layers: int
    encoder_layers: int = 0
    expert: np.ndarray | None = None
    clock: int = 0
    _sequence_start: int = 0
    _uses_before: np.ndarray = field(init=False)
    _nearness: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._uses_before = self.uses.copy()
        layers = np.arange(self.num_layers)
        self._nearness = 1 - (self._distance(layers, layers[:, None]) - 1) / self.decoder_layers

    def use(self, indices: Sequence[int], clock: int) -> None:
        """Count one use of each at this acquisition of the cache."""
        which = np.array(indices, np.intp)
        self.heat[which] = np.logaddexp2(self.heat[which], clock / self.half_life)
        self.last_used[which] = clock
        self.uses[which] += 1
        self.clock = clock

    def begin_sequence(self) -> None:
        """Count passes and uses of a sequence from here."""
        self._sequence_start = self.clock
        np.copyto(self._uses_before, self.uses)

    @property
    def sequence_passes(self) -> int:
        """Passes of the decoder in the sequence so far, the running one included; at least 1."""
        return max(0, self.clock - self._first_pass) // self.decoder_layers + 1

    @property
    def decoder_layers(self) -> int:
        """Layers that run for every token."""
        return self.num_layers - self.encoder_layers

    @property
    def _first_pass(self) -> int:
        """The first acquisition of the decoder in the sequence, behind one pass of an encoder."""
        return self._sequence_start + self.encoder_layers + 1

    def last_passes(self) -> np.ndarray:
        """The pass of the decoder in the sequence, from 1, that used each expert last; int64 [N], 0 where none did."""
        last: np.ndarray = np.maximum(self.last_used - self._first_pass, -1) // self.decoder_layers + 1
        return last

    def sequence_uses(self) -> np.ndarray:
        """Uses of each expert in the sequence, in any version, int64 [N]."""
        since: np.ndarray = self.uses - self._uses_before
        if self.expert is None:
            return since
        pooled = np.zeros_like(since)
        np.add.at(pooled, self.expert, since)
        return np.asarray(pooled[self.expert])

    def high_precision_uses(self) -> np.ndarray:
        """Uses of each expert in the sequence at its high precision, int64 [N]: all, where it has one version."""
        since: np.ndarray = self.uses - self._uses_before
        return since if self.expert is None else np.asarray(since[self.expert])

    @property
    def half_life(self) -> int:
        """In acquisitions: one per layer and token."""
        return HALF_LIFE_TOKENS * self.num_layers

    def unused(self) -> ExpertRecords:
        """The same experts before the first use."""
        return _unused(self.layer, self.frequency, self.num_layers, self.encoder_layers, self.expert)

    def turn(self, running_layer: int) -> np.ndarray:
        """What goes first whatever the policy, int [N]: 0 an encoder's layer that is over, of no use before the next
        prompt; 1 one that is still to come, which can be read ahead in order; 2 the decoder's, which every token needs.

        Source: EdgeMoE, expert buffer management: the encoder's experts go first
        (docs/experiments/2026-11-21-eviction-with-an-encoder.md).
        """
        is_ahead = self.layer > running_layer
        return np.where(self.layer < self.encoder_layers, np.where(is_ahead, 1, 0), 2)

    def layer_nearness(self, running_layer: int) -> np.ndarray:
        """1 - (d - 1)/L for every layer, d its `layer_distance`: 1 for the next one, 1/L for the running one."""
        nearness: np.ndarray = self._nearness[running_layer]
        return nearness

    def layer_distance(self, running_layer: int) -> np.ndarray:
        """How many MoE layers ahead each expert's layer runs next: 1 for the next layer, L for the running one.

        d = ((l - I - 1) mod L) + 1, L without the encoder's. Source: EdgeMoE, expert buffer management; the printed
        modulus is the other way round and contradicts the text around it.
        """
        return self._distance(self.layer, np.int64(running_layer))

    def _distance(self, layer: np.ndarray, running: np.ndarray | np.int64) -> np.ndarray:
        # Behind any layer of an encoder comes the decoder's first.
        distance: np.ndarray = (layer - np.maximum(running, self.encoder_layers - 1) - 1) % self.decoder_layers + 1
        return distance


def expert_records(
    layer: np.ndarray,
    popularity: np.ndarray,
    num_layers: int,
    encoder_layers: int = 0,
    expert: np.ndarray | None = None,
) -> ExpertRecords:
    """Records of experts that nothing has used yet. layer: int [N]; popularity: counts [N] over the same experts.

    expert: int [N], the high version of each, where some have two. A layer whose counts are all zero gives frequency 0
    to all of its experts.
    """
    counted = popularity if expert is None else np.where(expert == np.arange(len(expert)), popularity, 0)
    totals = np.maximum(np.bincount(layer, weights=counted, minlength=num_layers), 1)
    return _unused(layer.astype(np.int32), popularity / totals[layer], num_layers, encoder_layers, expert)


def _unused(
    layer: np.ndarray, frequency: np.ndarray, num_layers: int, encoder_layers: int, expert: np.ndarray | None
) -> ExpertRecords:
    """Heat as if each of the last HALF_LIFE_TOKENS tokens had used one expert of a layer, as calibration saw it."""
    zeros = np.zeros(len(layer), np.int64)
    with np.errstate(divide="ignore"):  # never seen: the first to go
        heat = np.log2(frequency * HALF_LIFE_TOKENS)
    return ExpertRecords(layer, frequency, zeros, zeros.copy(), heat, num_layers, encoder_layers, expert)


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
    """Least recently and frequently used: the heat, which ranks experts at any later time as it does now.

    Source: Lee et al., LRFU: A Spectrum of Policies that Subsumes the LRU and LFU Policies, section 3.
    """
    return records.heat


@dataclass(frozen=True, slots=True)
class MultidimensionalScore:
    """w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - (d - 1)/L), all within the sequence.

    T: passes so far (tokens, in decoding); R: the pass that used this version last; F, H: uses of the expert, and those
    at high precision, which are the same where experts have one version, so that LHU then adds to LFU; d: how many MoE
    layers ahead its layer runs. as_printed: (l - I) mod L in place of d - 1. That protects the idle experts of the
    running layer best, though they run last, and is kept for comparison.
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
        # As printed, distances are those that the layer before sees.
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
    """The score of a policy; weights: of the weighted ones, where they are not the default. Raises OptionError."""
    if weights is None:
        return SCORES[cast(Policy, policy)]
    return MultidimensionalScore(parse_weights(weights), as_printed=policy == "hobbit-printed")


def eviction_order(
    records: ExpertRecords, score: PolicyScore, running_layer: int, candidates: np.ndarray, count: int | None = None
) -> np.ndarray:
    """Candidates (int indices), first to evict first; ties by least recent use, then by index. count: only so many.

    An encoder's turn comes before every score (ExpertRecords.turn).
    """
    scores = score(records, running_layer)[candidates]
    if count is not None and count < len(candidates) and not records.encoder_layers:
        # A read needs one or two of some hundreds: these few are ordered, the rest is not.
        is_low = scores <= np.partition(scores, count)[count]
        candidates, scores = candidates[is_low], scores[is_low]
    keys = [candidates, records.last_used[candidates], scores]
    if records.encoder_layers:
        keys.append(records.turn(running_layer)[candidates])
    return candidates[np.lexsort(keys)][:count]


def bundle_records(bundle: Bundle, tables: Tables, entries: Sequence[ExpertEntry]) -> ExpertRecords:
    """What is known of stored experts before the first token: their layers and how often calibration saw them.

    A low version counts as often as the expert.
    """
    layer = np.array([entry.layer for entry in entries], np.int32)
    popularity = np.array([tables.popularity[entry.layer, entry.expert] for entry in entries], np.float64)
    model = bundle.manifest.model
    high = {entry.key: at for at, entry in enumerate(bundle.manifest.experts)}
    has_low = len(entries) > len(high)
    expert = np.array([high[entry.key] for entry in entries], np.intp) if has_low else None
    return expert_records(layer, popularity, model.num_layers, model.first_decoder_layer, expert)
