"""The form of an expert in its image on a device: matrices with their places, biases and activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.quant import UNIT_ALIGNMENT_BYTES, QuantSpec, round_up

from .. import kernels
from ..kernels.packed_matrix import PackedMatrix

if TYPE_CHECKING:
    import torch


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
    """Return the form of an expert whose image `image.write_image` makes."""
    at, matrices = 0, list[MatrixForm | None]()
    for matrix in (expert.gate, expert.up, expert.down):
        matrices.append(None if matrix is None else _place(matrix, at))
        at = at if matrix is None else round_up(at + matrix.data.nbytes, UNIT_ALIGNMENT_BYTES)
    biases = []
    for bias in expert.biases:
        biases.append((at, at + bias.nbytes))
        at = round_up(at + bias.nbytes, UNIT_ALIGNMENT_BYTES)
    gate, up, down = matrices
    if up is None or down is None:
        raise ValueError("an expert has up and down")
    return ExpertForm(gate, up, down, tuple(biases), expert.activation, expert.limit)


def _place(matrix: PackedMatrix, at: int) -> MatrixForm:
    return MatrixForm(at, at + matrix.data.nbytes, matrix.rows, matrix.columns, matrix.spec)


@dataclass(frozen=True, slots=True)
class Part:
    """An expert and the rows that it reads.

    image: its bytes on the device, uint8 [n].
    tokens: rows of the layer, int32 [n].
    """

    image: torch.Tensor
    form: ExpertForm
    tokens: np.ndarray
