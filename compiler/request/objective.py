"""Cost of a byte of each unit on the device. The search minimises the total.

* `size`: each byte counts once.
* `bytes-per-token`: a byte counts as often as a token reads it.
* `tpot`: the larger of compute time and storage time decides. Bytes count by reads if storage is the bottleneck, else
  once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moec.manifests.model import ModelSpec

Objective = Literal["tpot", "bytes-per-token", "size"]
OBJECTIVES: tuple[Objective, ...] = ("tpot", "bytes-per-token", "size")
# Weight of plain size in the read objectives. It decides between plans with equal reads, and limits the size of
# experts that calibration never saw.
SIZE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ByteWeights:
    """Cost of one packed byte.

    experts: float64 [L, E].
    dense: cost of any dense byte.
    size_share: cost of a byte that no token reads. The rest of an expert's cost is for the tokens that read it.
    """

    experts: np.ndarray
    dense: float
    size_share: float = 1.0


def byte_weights(model: ModelSpec, popularity: np.ndarray | None, reads: bool) -> ByteWeights:
    """Return weights for reads (bytes per token) or for plain size, normalised so that a mean expert byte costs 1.

    A dense byte costs as much as a mean expert byte: it is read only once, but it takes a byte from the expert cache.
    A byte of an encoder's expert costs the same: a prompt reads each of them once, popular or not.
    popularity: uint32 [L, E], tokens per expert, or None for even use.
    reads: weigh bytes by reads.
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
    """Return whether bytes are weighed by reads. For `tpot`: if storage takes longer than compute.

    TPOT = max(compute, expected missed bytes / storage bandwidth). Source: docs/design/compile.md, Objective.
    """
    if objective == "tpot":
        return missed_bytes / storage_bytes_per_s * 1e9 > compute_ns
    return objective == "bytes-per-token"
