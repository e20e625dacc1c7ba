"""Fit scales and minima to given codes: least squares on the outputs.

GPTQ rounds on scales that were chosen for rounding to nearest. With its codes fixed, outputs are linear in scales and
minima. The best ones solve a small system per row.
Shapes: N rows, K columns, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quantized import QuantizedMatrix, on_bytes

_RIDGE = 1e-4  # share of the mean diagonal; keeps what codes do not determine, such as scales of groups of zeros
SYSTEM_VALUES = 1 << 22
"""Values of the systems that are solved at once: 32 MiB."""


def refit(matrix: QuantizedMatrix, residual: Tensor, errors: Tensor, moment: Tensor) -> tuple[QuantizedMatrix, Tensor]:
    """Return the same codes on the scales and minima that minimise d H d^T in each row, up to the rounding of scales.

    Scales that would not be positive stay as they are. Also returns d H d^T of each row afterwards, float64 [N].
    residual: d H, [N, K], where d is the difference of weights and `matrix`.
    errors: d H d^T of each row, float64 [N].
    moment: H, [K, K], positive definite.
    """
    rows = max(1, SYSTEM_VALUES // (2 * matrix.scales.shape[1] ** 2))
    parts = [
        _refit_rows(
            matrix.rows(start, start + rows), residual[start : start + rows], errors[start : start + rows], moment
        )
        for start in range(0, len(residual), rows)
    ]
    scales, minima, after = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return QuantizedMatrix(matrix.spec, matrix.codes, scales, None if matrix.minima is None else minima), after


def _refit_rows(
    matrix: QuantizedMatrix, residual: Tensor, errors: Tensor, moment: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, minima and errors of some rows; see `refit`. Symmetric: minima mean nothing."""
    groups, system = matrix.scales.shape[1], _System.of(matrix, residual, moment)
    before = matrix.scales if matrix.minima is None else torch.cat([matrix.scales, matrix.minima], 1)
    wished = (before.float() + system.solved()).half()
    scales = wished[:, :groups]
    scales = torch.where((scales > 0) & torch.isfinite(scales), scales, matrix.scales)
    if matrix.minima is None:
        return scales, scales, errors + system.change(scales.float() - before.float())
    minima = torch.where(torch.isfinite(wished[:, groups:]), wished[:, groups:], matrix.minima)
    if matrix.spec.byte_scales:
        scales, minima = on_bytes(scales, minima, matrix.spec.largest_code)
    step = torch.cat([scales, minima], 1).float() - before.float()
    return scales, minima, errors + system.change(step)


@dataclass(frozen=True, slots=True)
class _System:
    """The least squares of some rows. A step s of scales and t of minima changes the error d H d^T of a row by

        s A s^T + 2 s C t^T + t M t^T - 2 (s . a + t . m).

    A, M and C are sums of H over pairs of groups, with codes as factors on both sides, on none, and on the left.
    M is the same in every row, so it is factored once.
    scales: A, [N, G, G].
    wanted_scales: a, sums of d H over groups with codes as factors, [N, G].
    between: C, [N, G, G]; minima: M, [G, G]; wanted_minima: m, [N, G]. All three are empty without minima.
    """

    scales: Tensor
    wanted_scales: Tensor
    between: Tensor
    minima: Tensor
    wanted_minima: Tensor

    @classmethod
    def of(cls, matrix: QuantizedMatrix, residual: Tensor, moment: Tensor) -> _System:
        """Sum up. residual: d H, [N, K]. moment: H, [K, K]."""
        (rows, columns), groups = matrix.codes.shape, matrix.scales.shape[1]
        centre = matrix.spec.centre if matrix.minima is None else 0
        codes, left = (values.reshape(rows, groups, -1) for values in (matrix.codes.float() - centre, residual))
        strips = moment.reshape(groups, columns // groups, columns)
        system = residual.new_empty(rows, groups, groups)
        for group in range(groups):
            # The matrix is symmetric, so only columns from this group on are multiplied.
            product = codes[:, group] @ strips[group, :, group * strips.shape[1] :]
            product = product.reshape(rows, groups - group, -1).mul_(codes[:, group:]).sum(-1)
            system[:, group, group:] = system[:, group:, group] = product
        wanted = (left * codes).sum(-1)
        nothing = residual.new_empty(0)
        if matrix.minima is None:
            return cls(system, wanted, nothing, nothing, nothing)
        # Each row of H, summed over a group's columns.
        sums = strips.reshape(groups, columns // groups, groups, -1).sum(-1)
        between = torch.bmm(codes.transpose(0, 1), sums).transpose(0, 1)
        return cls(system, wanted, between, sums.sum(1), left.sum(-1))

    def solved(self) -> Tensor:
        """Return the best steps of scales, followed by those of minima, [N, G] or [N, 2 G]."""
        if not len(self.minima):
            alone: Tensor = torch.linalg.solve(_raised(self.scales), self.wanted_scales)
            return alone
        # With M = L L^T, the minima are eliminated: (A - Y Y^T) s = a - Y z, where Y = C L^-T and z = m L^-T.
        lower = torch.linalg.cholesky(_raised(self.minima[None]))[0]
        inverse = torch.linalg.solve_triangular(lower, identity_like(lower), upper=False).T
        known, wanted = self.between @ inverse, self.wanted_minima @ inverse
        reduced = torch.baddbmm(_raised(self.scales), known, known.transpose(1, 2), alpha=-1)
        right = self.wanted_scales - torch.bmm(known, wanted[..., None])[..., 0]
        steps = torch.linalg.solve(reduced, right)
        of_minima = (wanted - torch.bmm(steps[:, None], known)[:, 0]) @ inverse.T
        return torch.cat([steps, of_minima], 1)

    def change(self, step: Tensor) -> Tensor:
        """Return how steps of scales and minima, [N, G] or [N, 2 G], change the error of each row, [N]."""
        groups = self.scales.shape[1]
        scales, minima = step[:, :groups], step[:, groups:]
        moved = torch.bmm(self.scales, scales[..., None])[..., 0] - 2 * self.wanted_scales
        if not len(self.minima):
            return (scales * moved).sum(1)
        moved += 2 * torch.bmm(self.between, minima[..., None])[..., 0]
        return (scales * moved).sum(1) + (minima * (minima @ self.minima - 2 * self.wanted_minima)).sum(1)


def identity_like(matrix: Tensor) -> Tensor:
    """Return the identity of the size, type and device of a square matrix."""
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _raised(systems: Tensor) -> Tensor:
    """Return positive semidefinite systems [N, P, P] with a ridge, which makes them definite."""
    ridge = (_RIDGE * systems.diagonal(dim1=1, dim2=2).mean(1)).clamp_min(torch.finfo(torch.float32).tiny)
    raised = systems.clone()
    raised.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    return raised
