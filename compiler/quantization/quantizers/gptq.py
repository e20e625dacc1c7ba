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
from .column_steps import BLOCK_COLUMNS, differences, round_columns
from .refit import FitInputs, identity_like, refit
from .rtn import CodedColumns, nearest, quantize_rtn

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
_OUTER_COLUMNS = 256
STACKED_ROWS = 2048
"""Rows of all formats that are rounded at once. A block of their columns should fit in the level-2 cache."""
_ROOT_ROWS = 256  # rows of a triangular factor in one product; the zeros left of them are not multiplied
_FEWER_ROWS = 0.75  # share of rows below which a copy of them takes less time than the products of the others
_DAMPING_GROWTH = 10.0
_DAMPING_TRIALS = 6
_ROUNDING = 4e-6  # errors under H are sums in float32; more than their relative error, so that no row gets worse


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The part of GPTQ that depends on second moments alone. All matrices of the same inputs and all formats share it.

    H is the second moment over its mean diagonal, with `damping` added to the diagonal.
    order: [K] columns, largest moment first; places: where the order has each column.
    factor: U^T with U^T U = H^-1, [K, K] lower triangular, in that order.
    root: M = U^-1 with M M^T = H, [K, K] upper triangular, in that order.

    GPTQ divides the error of each rounded column by its entry on the diagonal of U. Let E be these errors, [N, K].
    Each later column receives -E U, so the difference of the weights is D = E U. With H^-1 = U^T U it follows that
    D H D^T = E E^T. So the output error costs no product with H.
    """

    order: Tensor
    places: Tensor
    factor: Tensor
    root: Tensor
    damping: float

    def row_errors(self, difference: Tensor, enough: Tensor | None = None) -> Tensor:
        """Return D H D^T of each row, float64 [N], from D^T in that order, [K, N]: squares of D M without M's zeros.

        enough: [N]. The sum of a row may end once it is larger.
        """
        total = difference.new_zeros(difference.shape[1], dtype=torch.float64)
        rows = torch.arange(len(total), device=total.device)
        for start in range((len(difference) - 1) // _ROOT_ROWS * _ROOT_ROWS, -1, -_ROOT_ROWS):  # the largest sums first
            end = start + _ROOT_ROWS
            product = self.root[:end, start:end].T @ difference[:end]
            total.index_add_(0, rows, product.square_().sum(0).double())
            if enough is None:
                continue
            (going_on,) = (total <= enough)[rows].nonzero(as_tuple=True)
            if not len(going_on):
                break
            if len(going_on) < _FEWER_ROWS * len(rows):
                rows, difference = rows[going_on], difference[:, going_on]
        return total


def prepare_inputs(second_moment: Tensor, tokens: int) -> PreparedInputs:
    """Sort and factor a second moment.

    second_moment: [K, K].
    tokens: inputs in it, above 0.
    """
    moment = over_mean(second_moment)
    order = moment.diagonal().argsort(descending=True, stable=True)
    damping = DAMPING if tokens >= len(moment) else SPARSE_DAMPING
    factor, root, damping = triangular_factors(moment[order][:, order], damping)
    return PreparedInputs(order, order.argsort(), factor.T.contiguous(), root.contiguous(), damping)


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
        if not specs:
            return []
        prepared = prepared or prepare_inputs(second_moment, tokens)
        damped = over_mean(second_moment)
        damped.diagonal().add_(prepared.damping)
        columns = weight.detach().float().T.contiguous()
        fits = FitInputs(damped, damped @ columns)
        given = _Matrix(columns, columns[prepared.order], fits, second_moment.diagonal(), prepared)
        matrices = dict[QuantSpec, QuantizedMatrix]()
        for stacked in in_parts(sorted(set(specs), key=_turns), max(1, STACKED_ROWS // len(weight))):
            matrices.update(zip(stacked, _quantize(given, stacked), strict=True))
        return [matrices[spec] for spec in specs]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix to quantize and what its formats share.

    columns: W^T, [K, N]; ordered: the same in the order of GPTQ.
    importance: [K], diagonal of the second moment.
    """

    columns: Tensor
    ordered: Tensor
    fits: FitInputs
    importance: Tensor
    prepared: PreparedInputs


def _quantize(weight: _Matrix, specs: Sequence[QuantSpec]) -> list[QuantizedMatrix]:
    """Round to nearest, then run GPTQ in turns, and take the best result of each row, for each format."""
    first = [nearest(weight.columns, spec, True, weight.importance) for spec in specs]
    tried, best = list(first), dict[int, _Rows]()
    for turn in range(REFITS):
        running = [at for at, spec in enumerate(specs) if turn < _turns(spec)]
        compensated = compensate(weight.ordered, weight.prepared, [tried[at] for at in running]) if running else []
        for at, (codes, errors) in zip(running, compensated, strict=True):
            matrix, whole = CodedColumns(specs[at], codes, tried[at].scales, tried[at].minima), errors
            if specs[at].largest_code < REFITTED_CODES:
                matrix, whole = refit(matrix, weight.fits, errors)
            rows, tried[at] = _Rows.of(weight, matrix, whole), matrix
            best[at] = best[at].better(rows) if at in best else rows
    return [
        _Rows.nearest(weight, matrix, best[at].errors).better(best[at]).matrix.matrix()
        for at, matrix in enumerate(first)
    ]


def _turns(spec: QuantSpec) -> int:
    """Return how often columns of a format are rounded."""
    return REFITS if spec.largest_code < FEW_CODES else 1


@dataclass(frozen=True, slots=True)
class _Rows:
    """A matrix and the output error of each of its rows, float64 [N], under the moment over its mean diagonal."""

    matrix: CodedColumns
    errors: Tensor

    @classmethod
    def of(cls, weight: _Matrix, matrix: CodedColumns, damped: Tensor) -> _Rows:
        """Take errors under H, float64 [N], without what the damping adds to them."""
        _, squares = differences(weight.columns, matrix.codes, matrix.scales, matrix.minima)
        return cls(matrix, damped - weight.prepared.damping * squares)

    @classmethod
    def nearest(cls, weight: _Matrix, matrix: CodedColumns, others: Tensor) -> _Rows:
        """Take weights that are rounded to nearest. No row with a larger error is taken instead.

        others: errors of other matrices, [N]. Errors above them may be returned too low, but still above them.
        """
        prepared = weight.prepared
        difference, squares = differences(weight.columns, matrix.codes, matrix.scales, matrix.minima, prepared.places)
        undamped = prepared.damping * squares
        damped = prepared.row_errors(difference, (others + undamped) / (1 - _ROUNDING))
        return cls(matrix, damped * (1 - _ROUNDING) - undamped)

    def better(self, other: _Rows) -> _Rows:
        """Return the rows with the least output error from two matrices in one format. On a tie, this matrix wins."""
        takes = other.errors < self.errors
        if bool(takes.all()):
            return other
        codes, scales, minima = (
            torch.where(takes, theirs, own)
            for own, theirs in (
                (self.matrix.codes, other.matrix.codes),
                (self.matrix.scales, other.matrix.scales),
                (self.matrix.minima, other.matrix.minima),
            )
        )
        errors = torch.where(takes, other.errors, self.errors)
        return _Rows(CodedColumns(self.matrix.spec, codes, scales, minima), errors)


def compensate(
    ordered: Tensor, prepared: PreparedInputs, matrices: Sequence[CodedColumns]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each matrix the codes of GPTQ on its scales, uint8 [K, N], and D H D^T of each row, float64 [N].

    All formats are rounded at the same time, as rows of one matrix: rows are independent, and calls are fewer.
    ordered: weights, [K, N], whose columns are in the order of `prepared`.
    """
    rows = ordered.shape[1]
    codes, squares = _round_columns(ordered.repeat(1, len(matrices)), rows, prepared, _stacked(matrices))
    return list(
        zip((part.contiguous() for part in torch.split(codes, rows, 1)), torch.split(squares, rows), strict=True)
    )


def _stacked(matrices: Sequence[CodedColumns]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scales, their inverses and minima, [G, M], and the largest codes, [M], of F matrices [N, K]: M = F N rows.

    Groups of all matrices are divided into as many equal ones as all of them need.
    """
    groups = math.lcm(*(len(matrix.scales) for matrix in matrices))
    scales, minima = (
        torch.cat([values.repeat_interleave(groups // len(values), 0) for values in stacked], 1)
        for stacked in ([matrix.scales for matrix in matrices], [matrix.minima for matrix in matrices])
    )
    largest = [torch.full_like(matrix.codes[0], matrix.spec.largest_code) for matrix in matrices]
    inverses = torch.where(scales > 0, scales, torch.ones_like(scales)).reciprocal_()
    return scales, inverses, minima, torch.cat(largest)


def _round_columns(work: Tensor, rows: int, prepared: PreparedInputs, grid: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Round all columns. Return codes, uint8 [K, M], and the squared errors of each row, float64 [M].

    work: weights, [K, M]. Afterwards it holds the error of each column over its entry on the diagonal of U.
    rows: number of rows of one matrix, N.
    """
    columns, factor = len(work), prepared.factor
    codes, squares = torch.empty_like(work, dtype=torch.uint8), work.new_zeros(work.shape[1], dtype=torch.float64)
    matrices = torch.split(work, rows, 1)  # a product of more rows may round differently
    for outer in range(0, columns, _OUTER_COLUMNS):
        outer_end = min(outer + _OUTER_COLUMNS, columns)
        for start in range(outer, outer_end, BLOCK_COLUMNS):
            end = min(start + BLOCK_COLUMNS, outer_end)
            round_columns(work, factor, prepared.order, grid, start, end, codes, squares)
            for matrix in matrices:
                _pass_on(matrix, factor, start, end, outer_end)
        for matrix in matrices:
            _pass_on(matrix, factor, outer, outer_end, columns)
    return codes, squares


def _pass_on(work: Tensor, factor: Tensor, start: int, end: int, until: int) -> None:
    """Subtract the errors of the columns from start to end from the columns after them, up to `until`."""
    if end < until:
        work[end:until].addmm_(factor[end:until, start:end], work[start:end], alpha=-1.0)


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
