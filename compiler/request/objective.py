"""What a byte of each unit costs on the device: the search minimises the sum.

`size`: every byte counts once. `bytes-per-token`: a byte counts as often as a token reads it. `tpot`: the larger of
compute and storage time decides, so bytes count by reads where storage is the bottleneck and once where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moec.manifests.model import ModelSpec

Objective = Literal["tpot", "bytes-per-token", "size"]
OBJECTIVES: tuple[Objective, ...] = ("tpot", "bytes-per-token", "size")
# Weight of plain size inside the read objectives: decides between plans that read the same, and keeps experts that
# calibration never saw from growing without bound.
SIZE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ByteWeights:
    """Cost of one packed byte. experts: [L, E] float64; dense: of any dense byte.

    size_share: what a byte costs that nobody reads; the rest of an expert's cost is for the tokens that read it.
    """

    experts: np.ndarray
    dense: float
    size_share: float = 1.0


def byte_weights(model: ModelSpec, popularity: np.ndarray | None, reads: bool) -> ByteWeights:
    """Weights for `reads` (bytes per token) or for plain size; normalised so that a mean expert byte costs 1.

    popularity: uint32 [L, E] tokens per expert, None for even use. A dense byte costs as a mean expert byte: it is
    never read again, but it takes a byte from the expert cache. An encoder reads each of its experts once for a prompt,
    popular or not: their bytes cost as a mean expert byte, too.
    """
    layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)
    if not reads or popularity is None:
        return ByteWeights(np.ones((layers, experts)), 1.0)
    share = popularity / np.maximum(popularity.sum(axis=1, keepdims=True), 1)
    counts = np.array([[layer.experts.count] for layer in model.layers])
    weights = (1 - SIZE_SHARE) * share * counts + SIZE_SHARE
    weights[: model.first_decoder_layer] = 1.0
    return ByteWeights(weights, 1.0, SIZE_SHARE)


def reads_decide(objective: Objective, compute_ns: float, missed_bytes: float, storage_bytes_per_s: float) -> bool:
    """Whether bytes are weighed by reads: always, never, or for `tpot` where storage takes longer than compute.

    TPOT = max(compute, expected missed bytes / storage bandwidth). Source: docs/architecture.md, Objective.
    """
    if objective == "tpot":
        return missed_bytes / storage_bytes_per_s * 1e9 > compute_ns
    return objective == "bytes-per-token"
