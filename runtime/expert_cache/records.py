"""Records of the uses of each expert, from which the eviction policies decide, and the order of the warm start.

Index i is the i-th expert of the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moec.manifests.bundle import ExpertEntry

    from ..bundle.open_bundle import Bundle
    from ..bundle.tables import Tables

# After this many tokens a use counts half. Misses of the benchmark model on 600 tokens, 50 % of the experts in memory
# (docs/experiments/2026-11.md, 21: Eviction by uses with a half-life):
# - half-life of 8 tokens: 22,905
# - 32 tokens: 20,920
# - 64 tokens: 20,700
# - 128 tokens: 20,739
# - LRU: 26,132
# - LFU: 20,842
HALF_LIFE_TOKENS = 64


@dataclass(slots=True)
class ExpertRecords:
    """Uses of each expert of a cache. One request is that of one layer in one pass, for all of its experts.

    layer: layer of each expert, int32 [N].
    frequency: share of its layer's tokens that chose it in calibration, float64 [N].

    last_used: request that used it last, int64 [N]; 0 for never.
    uses: number of uses, int64 [N].
    heat: logarithm to base 2 of its weighted uses, float64 [N]. A use weighs twice as much as one that came
        HALF_LIFE_TOKENS earlier. The first value comes from calibration.

    num_layers: number of layers.
    encoder_layers: number of layers of an encoder. They are the first ones.
    expert: index of the high version of each expert, int [N]; None if experts have one version.
    clock: requests so far. Per-sequence counts start at the last `begin_sequence`.
    fits_pass: whether the cache would hold the experts of a pass, if every layer requested as much as the last one.
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
    fits_pass: bool = True
    _sequence_start: int = 0
    _uses_before: np.ndarray = field(init=False)
    _nearness: np.ndarray = field(init=False)
    _log2_distance: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._uses_before = self.uses.copy()
        layers = np.arange(self.num_layers)
        distance = self._distance(layers, layers[:, None])
        self._nearness = 1 - (distance - 1) / self.decoder_layers
        logarithms = np.array([-math.inf, *map(math.log2, range(1, self.decoder_layers + 1))])
        self._log2_distance = logarithms[distance]

    def use(self, indices: Sequence[int], clock: int) -> None:
        """Count one use of each expert. clock: number of this request."""
        which = np.array(indices, np.intp)
        self.heat[which] = np.logaddexp2(self.heat[which], clock / self.half_life)
        self.last_used[which] = clock
        self.uses[which] += 1
        self.clock = clock

    def begin_sequence(self) -> None:
        """Restart the counts of passes and uses of a sequence."""
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
        """Number of the decoder's first request in the sequence, after one pass of an encoder."""
        return self._sequence_start + self.encoder_layers + 1

    def last_passes(self) -> np.ndarray:
        """Return the decoder pass of the sequence that used each expert last, int64 [N]. Counted from 1; 0: none."""
        last: np.ndarray = np.maximum(self.last_used - self._first_pass, -1) // self.decoder_layers + 1
        return last

    def sequence_uses(self) -> np.ndarray:
        """Return the uses of each expert in the sequence, in any version, int64 [N]."""
        since: np.ndarray = self.uses - self._uses_before
        if self.expert is None:
            return since
        pooled = np.zeros_like(since)
        np.add.at(pooled, self.expert, since)
        return np.asarray(pooled[self.expert])

    def high_precision_uses(self) -> np.ndarray:
        """Return the uses of each expert's high version in the sequence, int64 [N]."""
        since: np.ndarray = self.uses - self._uses_before
        return since if self.expert is None else np.asarray(since[self.expert])

    @property
    def half_life(self) -> int:
        """Half-life of a use, in requests. A token has one request per layer."""
        return HALF_LIFE_TOKENS * self.num_layers

    def unused(self) -> ExpertRecords:
        """Return records of these experts without uses."""
        return _unused(self.layer, self.frequency, self.num_layers, self.encoder_layers, self.expert)

    def eviction_group(self, running_layer: int) -> np.ndarray:
        """Return the group of each expert, int [N]. A lower group is evicted first, under any policy.

        0: a finished layer of an encoder. It is not needed before the next prompt.
        1: a later layer of an encoder. It can be read ahead in order.
        2: a layer of the decoder. Every token needs it.
        Source: EdgeMoE, expert buffer management: the encoder's experts go first
        (docs/experiments/2026-11.md, 21: Eviction with an encoder).
        """
        is_ahead = self.layer > running_layer
        return np.where(self.layer < self.encoder_layers, np.where(is_ahead, 1, 0), 2)

    def layer_nearness(self, running_layer: int) -> np.ndarray:
        """Return 1 - (d - 1)/L of each layer, d its `layer_distance`: 1 for the next layer, 1/L for the running one."""
        nearness: np.ndarray = self._nearness[running_layer]
        return nearness

    def log2_distance(self, running_layer: int) -> np.ndarray:
        """Return the logarithm to base 2 of each layer's `layer_distance`, float64 [L]."""
        logarithms: np.ndarray = self._log2_distance[running_layer]
        return logarithms

    def layer_distance(self, running_layer: int) -> np.ndarray:
        """Return the distance of each expert's layer, in layers that run: 1 for the next layer, L for the running one.

        d = ((l - I - 1) mod L) + 1, where L does not count layers of an encoder.
        Source: EdgeMoE, expert buffer management. The printed modulus is reversed and contradicts the text around it.
        """
        return self._distance(self.layer, np.int64(running_layer))

    def _distance(self, layer: np.ndarray, running: np.ndarray | np.int64) -> np.ndarray:
        # After any layer of an encoder the next one that counts is the decoder's first.
        distance: np.ndarray = (layer - np.maximum(running, self.encoder_layers - 1) - 1) % self.decoder_layers + 1
        return distance


def expert_records(
    layer: np.ndarray,
    popularity: np.ndarray,
    num_layers: int,
    encoder_layers: int = 0,
    expert: np.ndarray | None = None,
) -> ExpertRecords:
    """Return records of experts without uses.

    layer: layer of each expert, int [N].
    popularity: tokens that chose it in calibration, [N]. If all counts of a layer are 0, its frequencies are 0.
    expert: index of the high version of each, int [N]; None if experts have one version.
    """
    counted = popularity if expert is None else np.where(expert == np.arange(len(expert)), popularity, 0)
    totals = np.maximum(np.bincount(layer, weights=counted, minlength=num_layers), 1)
    return _unused(layer.astype(np.int32), popularity / totals[layer], num_layers, encoder_layers, expert)


def _unused(
    layer: np.ndarray, frequency: np.ndarray, num_layers: int, encoder_layers: int, expert: np.ndarray | None
) -> ExpertRecords:
    """Return records without uses.

    The heat is that of HALF_LIFE_TOKENS tokens which used one expert per layer with the frequencies of calibration.
    """
    zeros = np.zeros(len(layer), np.int64)
    with np.errstate(divide="ignore"):  # an expert of frequency 0 is evicted first
        heat = np.log2(frequency * HALF_LIFE_TOKENS)
    return ExpertRecords(layer, frequency, zeros, zeros.copy(), heat, num_layers, encoder_layers, expert)


def warm_order(records: ExpertRecords) -> np.ndarray:
    """Return the experts in the order of the warm start.

    Layers of an encoder come first, in the order in which they run. Within a layer of an encoder, and within the whole
    decoder, the expert with the largest calibration frequency comes first.
    Source: EdgeMoE.
    """
    encoder = np.minimum(records.layer, records.encoder_layers)
    return np.lexsort((np.arange(len(records.layer)), -records.frequency, encoder))


def bundle_records(bundle: Bundle, tables: Tables, entries: Sequence[ExpertEntry]) -> ExpertRecords:
    """Return records of stored experts before the first token: their layers and calibration frequencies.

    A low version has the frequency of its expert.
    """
    layer = np.array([entry.layer for entry in entries], np.int32)
    popularity = np.array([tables.popularity[entry.layer, entry.expert] for entry in entries], np.float64)
    model = bundle.manifest.model
    high = {entry.key: at for at, entry in enumerate(bundle.manifest.experts)}
    has_low = len(entries) > len(high)
    expert = np.array([high[entry.key] for entry in entries], np.intp) if has_low else None
    return expert_records(layer, popularity, model.num_layers, model.first_decoder_layer, expert)
