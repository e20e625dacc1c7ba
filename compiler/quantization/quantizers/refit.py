"""Fit scales and minima to given codes: least squares on the outputs.

GPTQ rounds on scales that were chosen for rounding to nearest. With its codes fixed, outputs are linear in scales and
minima. The best ones solve a small system per row.
Shapes: N rows, K columns, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.manifests.quant import QuantSpec

from ..quantized import on_bytes
from .column_steps import code_sums, code_systems, multiplied, solved
from .rtn import CodedColumns

_RIDGE = 1e-4  # share of the mean diagonal; keeps what codes do not determine, such as scales of groups of zeros
SYSTEM_VALUES = 1 << 22
"""Values of the systems that are solved at once: 32 MiB at most."""
_ROWS = 192  # whose systems are solved at once


@dataclass(frozen=True, slots=True)
class FitInputs:
    """Inputs that all fits of a matrix share.

    moment: H, [K, K], positive definite.
    products: H W^T, [K, N], of the weights W.
    """

    moment: Tensor
    products: Tensor
    _sums: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def sums(self, groups: int) -> tuple[Tensor, Tensor]:
        """Return sums over groups of columns: of H, [G, K], and of H W^T, [G, N]."""
        if groups not in self._sums:
            self._sums[groups] = self._summed(self.moment, groups), self._summed(self.products, groups)
        return self._sums[groups]

    @staticmethod
    def _summed(matrix: Tensor, groups: int) -> Tensor:
        return matrix.reshape(groups, -1, matrix.shape[1]).sum(1)


def refit(matrix: CodedColumns, inputs: FitInputs, errors: Tensor) -> tuple[CodedColumns, Tensor]:
    """Return the same codes on the scales and minima that minimise d H d^T in each row, up to the rounding of scales.

    Scales that would not be positive stay as they are. Also returns d H d^T of each row afterwards, float64 [N].
    errors: d H d^T of each row, float64 [N], where d is the difference of weights and `matrix`.
    """
    rows = max(1, min(_ROWS, SYSTEM_VALUES // (2 * len(matrix.scales) ** 2)))
    sums = code_sums(inputs.products, matrix.codes, _centre(matrix.spec), len(matrix.scales))
    if not matrix.spec.symmetric:
        sums = torch.cat([sums, inputs.sums(len(sums))[1]])
    systems = sums.new_empty(len(sums), len(sums), min(rows, len(errors)))
    parts = [
        _refit_rows(matrix, inputs, sums[:, start : start + rows], start, systems)
        for start in range(0, len(errors), rows)
    ]
    scales, minima, change = (torch.cat(pieces, -1) for pieces in zip(*parts, strict=True))
    return CodedColumns(matrix.spec, matrix.codes, scales, minima), errors + change


def _centre(spec: QuantSpec) -> float:
    return float(spec.centre) if spec.symmetric else 0.0


def _refit_rows(
    matrix: CodedColumns, inputs: FitInputs, products: Tensor, start: int, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales and minima, [G, n], and the change of d H d^T, [n], of the rows from `start` on; see `refit`.

    A step x of scales, followed by minima, changes the error of a row by x S x^T - 2 x y^T. S sums H over pairs of
    groups, with codes as factors of the columns of scales; y is `products` minus S times what is before.
    products: sums of H W^T over groups, with codes as factors, then without them if the format has minima, [P, n].
    memory: for S, [P, P, n].
    """
    spec, groups, (size, rows) = matrix.spec, len(matrix.scales), products.shape
    scales, minima = (values[:, start : start + rows].contiguous() for values in (matrix.scales, matrix.minima))
    before = scales if spec.symmetric else torch.cat([scales, minima])
    moment_sums = inputs.moment[:0] if spec.symmetric else inputs.sums(groups)[0]
    systems = memory if memory.shape[2] == rows else products.new_empty(size, size, rows)
    code_systems(matrix.codes, _centre(spec), inputs.moment, moment_sums, start, systems)
    if not spec.symmetric:
        systems[groups:, groups:] = moment_sums.reshape(groups, groups, -1).sum(2)[..., None]
    wanted = products - multiplied(systems, before)
    blocks = systems.diagonal(dim1=0, dim2=1).T.reshape(-1, groups, rows)
    ridge = (_RIDGE * blocks.mean(1)).clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(groups, 0)
    wished = (before + solved(systems, ridge, wanted)).half().float()
    kept = torch.isfinite(wished)
    kept[:groups] &= wished[:groups] > 0
    after = torch.where(kept, wished, before)
    if spec.byte_scales:
        after = torch.cat(on_bytes(after[:groups].T, after[groups:].T, spec.largest_code), 1).T.float().contiguous()
    step = after - before
    change = (step * (multiplied(systems, step) - 2 * wanted)).sum(0)
    return after[:groups], -after * float(spec.centre) if spec.symmetric else after[groups:], change


def identity_like(matrix: Tensor) -> Tensor:
    """Return the identity of the size, type and device of a square matrix."""
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
