"""GPTQ: columns are rounded one after the other, and later columns compensate for the error of earlier ones.

* Groups are static: scales are chosen before any column is rounded.
* Columns are ordered by the second moment of their inputs, largest first.
* Group ranges come from a clip search.
* With up to sixteen codes, scales are fitted to the codes (refit.py). With up to four, codes and scales alternate.
* Rounding to nearest is always tried too, so no row gets worse than that.

Source: GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, section 3, algorithm 1.
Shapes: N rows, K columns, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.manifests.quant import QuantSpec

from ...workspace.parallel import in_parts, one_torch_thread
from ..quantized import QuantizedMatrix
from .refit import identity_like, refit
from .rtn import quantize_rtn

DAMPING = 0.01
"""Share of the mean diagonal that is added to the second moment, for at least as many tokens as columns."""
SPARSE_DAMPING = 0.1
"""The share for fewer tokens than columns. It lowers the output error on held-out inputs by up to 10 %."""
ONE_THREAD_WEIGHTS = 1 << 22
"""Matrices below this many weights use one thread, because their operations are too short to divide."""
REFITTED_CODES, FEW_CODES, REFITS = 16, 4, 4
"""Limits of the fit of scales to GPTQ's codes.

Formats of up to REFITTED_CODES codes get fitted scales. With up to FEW_CODES codes, rounding and fitting repeat REFITS
times. Measured (docs/experiments/2026-11.md, 22: Scales fitted at 3 and 4 bits):
- 3 bits: KL falls by 15 to 40 % in the first turn, and little further in later turns.
- 2 bits, four turns: output error on held-out inputs falls by a tenth.
- below 2 bits, four turns: it falls by a sixth.
"""
# Columns in a block are updated one by one, later columns of the outer block by one product per block, and all others
# by one product per outer block. So the whole matrix passes through the cache once per outer block.
_BLOCK_COLUMNS, _OUTER_COLUMNS = 32, 256
STACKED_ROWS = 4096
"""Rows of all formats that are rounded at once. A block of their columns should fit in the level-2 cache."""
_ROOT_ROWS = 256  # rows of a triangular factor in one product; the zeros left of them are not multiplied
_DAMPING_GROWTH = 10.0
_DAMPING_TRIALS = 6
_ROUNDING = 4e-6  # errors under H are sums in float32; more than their relative error, so that no row gets worse


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The part of GPTQ that depends on second moments alone. All matrices of the same inputs and all formats share it.

    H is the second moment over its mean diagonal, with `damping` added to the diagonal.
    order: [K] columns, largest moment first.
    factor: U with U^T U = H^-1, [K, K] upper triangular, in that order.
    root: M = U^-1 with M M^T = H, [K, K] upper triangular, in that order.

    GPTQ divides the error of each rounded column by its entry on the diagonal of U. Let E be these errors, [N, K].
    Each later column receives -E U, so the difference of the weights is D = E U. With H^-1 = U^T U it follows that

        D H = E U^-T = E M^T  and  D H D^T = E E^T.

    So the output error costs no product with H, and its gradient D H costs half of one.
    """

    order: Tensor
    factor: Tensor
    root: Tensor
    damping: float

    def residual(self, errors: Tensor) -> Tensor:
        """Return D H [N, K] from E^T [K, N], whose rows are in the order of GPTQ."""
        sums = torch.empty_like(errors)
        for start in range(0, len(errors), _ROOT_ROWS):
            end = start + _ROOT_ROWS
            torch.mm(self.root[start:end, start:], errors[start:], out=sums[start:end])
        return torch.empty_like(sums).index_copy_(0, self.order, sums).T.contiguous()

    def row_errors(self, difference: Tensor) -> Tensor:
        """Return D H D^T of each row, float64 [N], from D, [N, K]: the squares of D M, without the zeros of M."""
        columns = difference.T.contiguous()[self.order]
        total = difference.new_zeros(len(difference), dtype=torch.float64)
        for start in range(0, len(columns), _ROOT_ROWS):
            end = start + _ROOT_ROWS
            total += (self.root[:end, start:end].T @ columns[:end]).square_().sum(0, dtype=torch.float64)
        return total


def prepare_inputs(second_moment: Tensor, tokens: int) -> PreparedInputs:
    """Sort and factor a second moment.

    second_moment: [K, K].
    tokens: inputs in it, above 0.
    """
    moment = over_mean(second_moment)
    order = moment.diagonal().argsort(descending=True, stable=True)
    damping = DAMPING if tokens >= len(moment) else SPARSE_DAMPING
    return PreparedInputs(order, *triangular_factors(moment[order][:, order], damping))


def over_mean(second_moment: Tensor) -> Tensor:
    """Return a second moment [K, K] over the mean of its diagonal, a new float32 tensor. Zeros stay zeros."""
    moment = second_moment.float()
    return moment / moment.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)


def quantize_gptq(
    weight: Tensor,
    spec: QuantSpec,
    second_moment: Tensor | None,
    tokens: int,
    prepared: PreparedInputs | None = None,
) -> QuantizedMatrix:
    """Quantize a matrix against the second moment of its inputs; see `quantize_formats`."""
    return quantize_formats(weight, [spec], second_moment, tokens, prepared)[0]


def quantize_formats(
    weight: Tensor,
    specs: Sequence[QuantSpec],
    second_moment: Tensor | None,
    tokens: int,
    prepared: PreparedInputs | None = None,
) -> list[QuantizedMatrix]:
    """Quantize a matrix in several formats against the second moment of its inputs.

    Without tokens or a second moment, it is rounded to nearest with clip search.
    In each row, trace(d H d^T) is at most that of rounding to nearest with clip search.

    weight: [N, K] floats, finite.
    second_moment: [K, K], sum of x x^T over the inputs x, in any scale, or None.
    tokens: number of inputs.
    prepared: result of prepare_inputs for this moment.
    Raises ValueError if a format does not fit.
    Raises RangeExceeded if its scales would exceed float16.
    """
    with one_torch_thread() if weight.numel() < ONE_THREAD_WEIGHTS else nullcontext():
        if second_moment is None or not tokens:
            return [quantize_rtn(weight, spec, True) for spec in specs]
        prepared = prepared or prepare_inputs(second_moment, tokens)
        matrices = dict[QuantSpec, QuantizedMatrix]()
        for stacked in in_parts(sorted(set(specs), key=_turns), max(1, STACKED_ROWS // len(weight))):
            matrices.update(
                zip(stacked, _quantize(weight.detach().float(), stacked, second_moment, prepared), strict=True)
            )
        return [matrices[spec] for spec in specs]


def _quantize(
    weight: Tensor, specs: Sequence[QuantSpec], second_moment: Tensor, prepared: PreparedInputs
) -> list[QuantizedMatrix]:
    """Round to nearest, then run GPTQ in turns, and take the best result of each row, for each format."""
    damped = over_mean(second_moment)
    damped.diagonal().add_(prepared.damping)
    tried = [quantize_rtn(weight, spec, True, second_moment.diagonal()) for spec in specs]
    best = [_Rows.nearest(weight, matrix, prepared) for matrix in tried]
    for turn in range(REFITS):
        running = [at for at, spec in enumerate(specs) if turn < _turns(spec)]
        compensated = compensate(weight, prepared, [tried[at] for at in running]) if running else []
        for at, (codes, errors) in zip(running, compensated, strict=True):
            matrix, whole = _fitted(tried[at], codes, errors, prepared, damped)
            difference = matrix.dequantize().sub_(weight)
            best[at] = best[at].better(_Rows.of(matrix, whole, difference, prepared.damping))
            tried[at] = matrix
    return [rows.matrix for rows in best]


def _fitted(
    before: QuantizedMatrix, codes: Tensor, errors: Tensor, prepared: PreparedInputs, damped: Tensor
) -> tuple[QuantizedMatrix, Tensor]:
    """Return the codes of `compensate` on fitted scales if there are few, else on those before, and D H D^T of rows."""
    matrix = QuantizedMatrix(before.spec, codes, before.scales, before.minima)
    whole = errors.square().sum(0, dtype=torch.float64)
    if before.spec.largest_code >= REFITTED_CODES:
        return matrix, whole
    return refit(matrix, prepared.residual(errors), whole, damped)


def _turns(spec: QuantSpec) -> int:
    """Return how often columns of a format are rounded."""
    return REFITS if spec.largest_code < FEW_CODES else 1


@dataclass(frozen=True, slots=True)
class _Rows:
    """A matrix and the output error of each of its rows, float64 [N], under the moment over its mean diagonal."""

    matrix: QuantizedMatrix
    errors: Tensor

    @classmethod
    def of(cls, matrix: QuantizedMatrix, damped: Tensor, difference: Tensor, damping: float) -> _Rows:
        """Take errors under H, float64 [N], without what the damping adds to them. difference: D, [N, K]; changed."""
        return cls(matrix, damped - damping * difference.square_().sum(1, dtype=torch.float64))

    @classmethod
    def nearest(cls, weight: Tensor, matrix: QuantizedMatrix, prepared: PreparedInputs) -> _Rows:
        """Take weights that are rounded to nearest. No row with a larger error is taken instead."""
        difference = matrix.dequantize().sub_(weight)
        return cls.of(matrix, prepared.row_errors(difference) * (1 - _ROUNDING), difference, prepared.damping)

    def better(self, other: _Rows) -> _Rows:
        """Return the rows with the least output error from two matrices in one format. On a tie, this matrix wins."""
        takes = other.errors < self.errors
        rows, one, two = takes.unsqueeze(1), self.matrix, other.matrix
        minima = None
        if one.minima is not None and two.minima is not None:
            minima = torch.where(rows, two.minima, one.minima)
        codes, scales = torch.where(rows, two.codes, one.codes), torch.where(rows, two.scales, one.scales)
        errors = torch.where(takes, other.errors, self.errors)
        return _Rows(QuantizedMatrix(one.spec, codes, scales, minima), errors)


def compensate(
    weight: Tensor, prepared: PreparedInputs, matrices: Sequence[QuantizedMatrix]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each matrix the codes of GPTQ on its scales, uint8 [N, K], and its errors E^T, [K, N].

    All formats are rounded at the same time, as rows of one matrix: rows are independent, and calls are fewer.
    weight: [N, K].
    The rows of the errors are in the order of `prepared`.
    """
    order, rows = prepared.order, len(weight)
    work = weight.T.contiguous()[order].repeat(1, len(matrices))
    codes = _round_columns(work, rows, prepared, _Grid.of(matrices))
    parts = zip(torch.split(codes, rows, 1), torch.split(work, rows, 1), strict=True)
    return [
        (torch.empty_like(rounded).index_copy_(0, order, rounded).T.contiguous(), errors) for rounded, errors in parts
    ]


@dataclass(frozen=True, slots=True)
class _Grid:
    """Values that codes of F matrices [N, K] stand for. M = F N is the number of stacked rows.

    Groups of all matrices are divided into as many equal ones as all of them need.
    scales, minima: [G, M].
    largest: the largest code of each row, float32 [M].
    """

    scales: Tensor
    minima: Tensor
    largest: Tensor

    @classmethod
    def of(cls, matrices: Sequence[QuantizedMatrix]) -> _Grid:
        """Stack the grids of matrices with the same shape."""
        groups = math.lcm(*(matrix.scales.shape[1] for matrix in matrices))
        scales, minima, largest = list[Tensor](), list[Tensor](), list[Tensor]()
        for matrix in matrices:
            scale, spec = matrix.scales.float(), matrix.spec
            low = -scale * float(spec.centre) if matrix.minima is None else matrix.minima.float()
            times = groups // scale.shape[1]
            scales.append(scale.T.repeat_interleave(times, 0))
            minima.append(low.T.repeat_interleave(times, 0))
            largest.append(scale.new_full((len(scale),), float(spec.largest_code)))
        return cls(torch.cat(scales, 1), torch.cat(minima, 1), torch.cat(largest))


def _round_columns(work: Tensor, rows: int, prepared: PreparedInputs, grid: _Grid) -> Tensor:
    """Round column by column and return codes, uint8 [K, M].

    work: weights, [K, M]. Afterwards it holds the error of each column over its entry on the diagonal of U.
    rows: number of rows of one matrix, N.
    """
    columns, factor = len(work), prepared.factor
    of_column = (prepared.order // (columns // len(grid.scales))).cpu().tolist()
    codes = torch.empty_like(work, dtype=torch.uint8)
    scales, minima = grid.scales.unbind(), grid.minima.unbind()
    steps = torch.where(grid.scales > 0, grid.scales, torch.ones_like(grid.scales)).reciprocal_().unbind()
    block, value = work.new_empty(_BLOCK_COLUMNS, work.shape[1]), work.new_empty(work.shape[1])
    matrices = torch.split(work, rows, 1)  # a product of more rows may round differently
    diagonal = factor.diagonal().cpu().tolist()
    for outer in range(0, columns, _OUTER_COLUMNS):
        outer_end = min(outer + _OUTER_COLUMNS, columns)
        for start in range(outer, outer_end, _BLOCK_COLUMNS):
            end = min(start + _BLOCK_COLUMNS, outer_end)
            rounded = block[: end - start]
            for column, weight, code in zip(range(start, end), work[start:end].unbind(), rounded.unbind(), strict=True):
                group = of_column[column]
                torch.sub(weight, minima[group], out=code).mul_(steps[group]).round_().clamp_min_(0.0)
                torch.minimum(code, grid.largest, out=code)
                torch.addcmul(minima[group], code, scales[group], out=value)
                weight.sub_(value).div_(diagonal[column])
                if column + 1 < end:
                    work[column + 1 : end].addr_(factor[column, column + 1 : end], weight, alpha=-1.0)
            codes[start:end] = rounded
            for matrix in matrices:
                _pass_on(matrix, factor, start, end, outer_end)
        for matrix in matrices:
            _pass_on(matrix, factor, outer, outer_end, columns)
    return codes


def _pass_on(work: Tensor, factor: Tensor, start: int, end: int, until: int) -> None:
    """Subtract the errors of the columns from start to end from the columns after them, up to `until`."""
    if end < until:
        work[end:until].addmm_(factor[start:end, end:until].T, work[start:end], alpha=-1.0)


def triangular_factors(moment: Tensor, damping: float) -> tuple[Tensor, Tensor, float]:
    """Return upper triangular U and M with U^T U = (H + damping I)^-1 and M = U^-1, [K, K], and the damping.

    Columns without any input stay independent.
    moment: H, [K, K], with a mean diagonal of 1, or zeros.
    damping: raised tenfold while the sum is not positive definite in float32.
    Raises ValueError if no damping helps, because values are not finite.
    """
    for _ in range(_DAMPING_TRIALS):
        damped = moment.clone()
        damped.diagonal().add_(damping)
        # Reversing rows and columns turns H = L L^T into H = M M^T with M upper triangular.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            root = lower.flip(0, 1)
            factor: Tensor = torch.linalg.solve_triangular(root, identity_like(root), upper=True)
            return factor, root, damping
        damping *= _DAMPING_GROWTH
    raise ValueError("a second moment is not positive definite, expected finite inputs")
