"""Fit scales and minima to given codes: least squares on the outputs.

GPTQ rounds on scales that were chosen for rounding to nearest. With its codes fixed, outputs are linear in scales and
minima. The best ones solve a small system per row.
Shapes: N rows, K columns, G groups of g columns, P = G, or 2 G with minima.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..byte_scales import on_bytes
from ..quantized import QuantizedMatrix

_RIDGE = 1e-4  # share of the mean diagonal; keeps what codes do not determine, such as scales of groups of zeros
SYSTEM_VALUES = 1 << 22
"""Values of the systems that are solved at once: 32 MiB."""


def refit(weight: Tensor, matrix: QuantizedMatrix, moment: Tensor) -> QuantizedMatrix:
    """Return the same codes on the scales and minima that minimise d H d^T in each row, up to float16.

    Scales that would not be positive stay as they are.
    weight: [N, K] float32.
    moment: H, [K, K], positive definite.
    """
    groups = matrix.scales.shape[1]
    unknowns = groups if matrix.minima is None else 2 * groups
    rows = max(1, SYSTEM_VALUES // unknowns**2)
    residual = (weight - matrix.dequantize()) @ moment
    offset = matrix.spec.centre if matrix.minima is None else 0
    parts = [
        _steps(codes.float() - offset, left, moment, groups, matrix.minima is not None)
        for codes, left in zip(torch.split(matrix.codes, rows), torch.split(residual, rows), strict=True)
    ]
    steps = torch.cat(parts)
    scales = (matrix.scales.float() + steps[:, :groups]).half()
    scales = torch.where((scales > 0) & torch.isfinite(scales), scales, matrix.scales)
    if matrix.minima is None:
        return QuantizedMatrix(matrix.spec, matrix.codes, scales, None)
    minima = (matrix.minima.float() + steps[:, groups:]).half()
    minima = torch.where(torch.isfinite(minima), minima, matrix.minima)
    if matrix.spec.byte_scales:
        scales, minima = on_bytes(scales, minima, matrix.spec.largest_code)
    return QuantizedMatrix(matrix.spec, matrix.codes, scales, minima)


def _steps(codes: Tensor, residual: Tensor, moment: Tensor, groups: int, has_minima: bool) -> Tensor:
    """Return the steps for scales, followed by those for minima, float32 [N, P].

    codes: [N, K].
    residual: d H, [N, K].
    """
    rows, columns = codes.shape
    grouped, left = codes.reshape(rows, groups, -1), residual.reshape(rows, groups, -1)
    strips = moment.reshape(groups, columns // groups, columns)
    unknowns = 2 * groups if has_minima else groups
    system = torch.empty(rows, unknowns, unknowns, dtype=torch.float64)
    wanted = [(left * grouped).sum(-1)]
    for group in range(groups):
        # The block of scales is symmetric, so only columns from this group on are multiplied.
        product = grouped[:, group] @ strips[group, :, group * strips.shape[1] :]
        product = product.reshape(rows, groups - group, -1).mul_(grouped[:, group:]).sum(-1)
        system[:, group, group:groups] = system[:, group:groups, group] = product
    if has_minima:
        # Each row of H, summed over a group's columns.
        sums = strips.reshape(groups, columns // groups, groups, -1).sum(-1)
        between = torch.bmm(grouped.transpose(0, 1), sums).transpose(0, 1)
        system[:, :groups, groups:] = between
        system[:, groups:, :groups] = between.transpose(1, 2)
        system[:, groups:, groups:] = sums.sum(1)
        wanted.append(left.sum(-1))
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += (_RIDGE * diagonal.mean(1, keepdim=True)).clamp_min(torch.finfo(torch.float32).tiny)
    steps: Tensor = torch.linalg.solve(system, torch.cat(wanted, 1).double())
    return steps.float()
