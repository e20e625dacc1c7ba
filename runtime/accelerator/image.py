"""The image of an expert, as a device stores it: packed matrices, then biases, each aligned to 64 bytes; and its form.

Other bytes of the expert file, between and after these parts, are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.bundle import ExpertEntry
from moec.manifests.model import ModelSpec
from moec.manifests.quant import UNIT_ALIGNMENT_BYTES, QuantSpec, round_up

from .. import kernels

if TYPE_CHECKING:
    import torch


def expert_parts(expert: kernels.Expert) -> Iterator[np.ndarray]:
    """Yield the parts of an image in order, uint8 [n] each: gate if there is one, up, down, their biases."""
    for matrix in (expert.gate, expert.up, expert.down):
        if matrix is not None:
            yield matrix.data
    for bias in expert.biases:
        yield bias.view(np.uint8)


def expert_bytes(expert: kernels.Expert) -> int:
    """Return the bytes of an expert's image."""
    return sum(round_up(array.nbytes, UNIT_ALIGNMENT_BYTES) for array in expert_parts(expert))


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
    for array in expert_parts(expert):
        end = at + array.nbytes
        if end > len(target):
            raise ValueError(f"target: expected {expert_bytes(expert)} bytes, found {len(target)}")
        target[at:end] = array
        at = round_up(end, UNIT_ALIGNMENT_BYTES)
    return at


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """A packed matrix in an expert's image: its first and last byte, its shape and format."""

    start: int
    end: int
    rows: int
    columns: int
    spec: QuantSpec

    @property
    def reads_rounded(self) -> bool:
        """True if the matrix reads activations rounded to 8 bits."""
        return self.spec.bitwidth != 16


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """Data that a device needs to compute an expert, apart from its bytes.

    gate: None without one.
    biases: first and last byte in the image of those of gate, up and down; empty without biases.
    """

    gate: MatrixForm | None
    up: MatrixForm
    down: MatrixForm
    biases: tuple[tuple[int, int], ...]
    activation: str
    limit: float


def expert_form(expert: kernels.Expert) -> ExpertForm:
    """Return the form of an expert whose image `write_image` makes."""
    at, matrices = 0, list[MatrixForm | None]()
    for matrix in (expert.gate, expert.up, expert.down):
        if matrix is None:
            matrices.append(None)
            continue
        end = at + matrix.data.nbytes
        matrices.append(MatrixForm(at, end, matrix.rows, matrix.columns, matrix.spec))
        at = round_up(end, UNIT_ALIGNMENT_BYTES)
    biases = []
    for bias in expert.biases:
        biases.append((at, at + bias.nbytes))
        at = round_up(at + bias.nbytes, UNIT_ALIGNMENT_BYTES)
    gate, up, down = matrices
    if up is None or down is None:
        raise ValueError("an expert has up and down")
    return ExpertForm(gate, up, down, tuple(biases), expert.activation, expert.limit)


@dataclass(frozen=True, slots=True)
class Part:
    """An expert and the rows that it reads.

    image: its bytes on the device, uint8 [n].
    tokens: rows of the layer, int32 [n].
    """

    image: torch.Tensor
    form: ExpertForm
    tokens: np.ndarray
