"""The image of an expert, as a device stores it: packed matrices, then biases, each aligned to 64 bytes.

Other bytes of the expert file, between and after these parts, are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moec.manifests.bundle import ExpertEntry
from moec.manifests.model import ModelSpec
from moec.manifests.quant import UNIT_ALIGNMENT_BYTES, round_up

from .. import kernels


def expert_parts(expert: kernels.Expert) -> Iterator[np.ndarray]:
    """Yield the parts of an image in order, uint8 [n] each: gate if there is one, up, down, their biases."""
    for matrix in (expert.gate, expert.up, expert.down):
        if matrix is not None:
            yield matrix.data
    for bias in expert.biases:
        yield bias.view(np.uint8)


def expert_bytes(expert: kernels.Expert) -> int:
    """Return the bytes of an expert's image."""
    return sum(round_up(part.nbytes, UNIT_ALIGNMENT_BYTES) for part in expert_parts(expert))


def entry_bytes(model: ModelSpec, entry: ExpertEntry) -> int:
    """Return `expert_bytes` of an expert that the manifest lists, before it is read."""
    spec, total = model.layers[entry.layer].experts, 0
    for projection in spec.projections:
        rows, columns = model.unit_shape(entry.layer, projection)
        total += round_up(entry.spec(projection).packed_bytes(rows, columns), UNIT_ALIGNMENT_BYTES)
        total += round_up(4 * rows, UNIT_ALIGNMENT_BYTES) if spec.has_bias else 0
    return total


def write_image(expert: kernels.Expert, target: np.ndarray) -> int:
    """Copy an expert into target, uint8 [n], and return its bytes.

    Raises ValueError if the target is too short.
    """
    at = 0
    for part in expert_parts(expert):
        end = at + part.nbytes
        if end > len(target):
            raise ValueError(f"target: expected {expert_bytes(expert)} bytes, found {len(target)}")
        target[at:end] = part
        at = round_up(end, UNIT_ALIGNMENT_BYTES)
    return at
