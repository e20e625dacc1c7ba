"""The bytes of an expert as a device holds them: packed matrices, then biases, each where 64 bytes begin.

What the expert file has between them and behind them stays at home.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moec.manifests.bundle import ExpertEntry
from moec.manifests.model import ModelSpec
from moec.manifests.quant import UNIT_ALIGNMENT_BYTES, round_up

from .. import kernels


def expert_parts(expert: kernels.Expert) -> Iterator[np.ndarray]:
    """What a copy carries, in order, uint8 [n] each: gate where there is one, up, down, their biases."""
    for matrix in (expert.gate, expert.up, expert.down):
        if matrix is not None:
            yield matrix.data
    for bias in expert.biases:
        yield bias.view(np.uint8)


def expert_bytes(expert: kernels.Expert) -> int:
    """Of the image of an expert."""
    return sum(round_up(part.nbytes, UNIT_ALIGNMENT_BYTES) for part in expert_parts(expert))


def entry_bytes(model: ModelSpec, entry: ExpertEntry) -> int:
    """`expert_bytes` of what the manifest lists, before anything is read."""
    spec, total = model.layers[entry.layer].experts, 0
    for projection in spec.projections:
        rows, columns = model.unit_shape(entry.layer, projection)
        total += round_up(entry.spec(projection).packed_bytes(rows, columns), UNIT_ALIGNMENT_BYTES)
        total += round_up(4 * rows, UNIT_ALIGNMENT_BYTES) if spec.has_bias else 0
    return total


def write_image(expert: kernels.Expert, target: np.ndarray) -> int:
    """Copy an expert into uint8 [n]. Returns its bytes. Raises ValueError if the target is too short."""
    at = 0
    for part in expert_parts(expert):
        end = at + part.nbytes
        if end > len(target):
            raise ValueError(f"target: expected {expert_bytes(expert)} bytes, found {len(target)}")
        target[at:end] = part
        at = round_up(end, UNIT_ALIGNMENT_BYTES)
    return at
