"""GPTQ: columns are rounded one after the other, and later columns compensate for the error of earlier ones.

* Groups are static: scales are chosen before any column is rounded.
* Columns are ordered by the second moment of their inputs, largest first.
* Group ranges come from a clip search.
* With up to sixteen codes, scales are fitted to the codes (refit.py). With up to four, codes and scales alternate.
* Rounding to nearest is always tried too, so no row gets worse than that.

Source: GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, section 3, algorithm 1.
Shapes: B matrices, N rows, K columns, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.manifests.quant import QuantSpec

from ...workspace.parallel import one_torch_thread
from ..output_error import row_errors
from ..quantized import QuantizedMatrix
from .refit import refit
from .rtn import quantize_rtn

DAMPING = 0.01
"""Share of the mean diagonal that is added to the second moment, for at least as many tokens as columns."""
SPARSE_DAMPING = 0.1
"""The share for fewer tokens than columns. It lowers the output error on held-out inputs by up to 10 %."""
ONE_THREAD_WEIGHTS = 1 << 22
"""Batches below this many weights use one thread, because their operations are too short to divide."""
REFITTED_CODES, FEW_CODES, REFITS = 16, 4, 4
"""Limits of the fit of scales to GPTQ's codes.

Formats of up to REFITTED_CODES codes get fitted scales. With up to FEW_CODES codes, rounding and fitting repeat REFITS
times. Measured (docs/experiments/2026-11-22-scales-fitted-at-3-and-4-bits.md and 2026-11-21-scales-fitted-to-codes.md):
- 3 bits: KL falls by 15 to 40 % in the first turn, and little further in later turns.
- 2 bits, four turns: output error on held-out inputs falls by a tenth.
- below 2 bits, four turns: it falls by a sixth.
"""
_BLOCK_COLUMNS = 32  # columns in a block are updated one by one, later columns by one product per block
_DAMPING_GROWTH = 10.0
_DAMPING_TRIALS = 6


def quantize_gptq(weight: Tensor, spec: QuantSpec, second_moment: Tensor | None, tokens: int) -> QuantizedMatrix:
    """Quantize one matrix; see quantize_gptq_batch.

    weight: [N, K] floats.
    second_moment: [K, K], sum of x x^T over the inputs x, or None.
    tokens: number of inputs.
    """
    moments = None if second_moment is None else second_moment.unsqueeze(0)
    return quantize_gptq_batch(weight.unsqueeze(0), spec, moments, torch.tensor([tokens]))[0]


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The part of GPTQ that depends on second moments alone. All matrices of the same inputs and all formats share it.

    order: [B, K] columns, largest moment first.
    factors: [B, K, K] upper triangular, in that order.
    """

    order: Tensor
    factors: Tensor


def prepare_inputs(second_moments: Tensor, counts: Sequence[int]) -> PreparedInputs:
    """Sort and factor second moments.

    second_moments: [B, K, K].
    counts: inputs that each matrix has seen, all above 0.
    """
    moments = second_moments.float()
    moments = (
        moments / moments.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float32).tiny)[:, None, None]
    )
    order = moments.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    moments = moments.gather(1, order[:, :, None].expand_as(moments)).gather(2, order[:, None].expand_as(moments))
    columns = moments.shape[1]
    damping = torch.tensor([DAMPING if count >= columns else SPARSE_DAMPING for count in counts])
    return PreparedInputs(order, inverse_factors(moments, damping))


def quantize_gptq_batch(
    weights: Tensor,
    spec: QuantSpec,
    second_moments: Tensor | None,
    tokens: Tensor | None,
    prepared: PreparedInputs | None = None,
) -> list[QuantizedMatrix]:
    """Quantize matrices of one shape, each against the second moment of its inputs.

    Matrices without tokens are rounded to nearest with clip search, and so are all without second moments.
    Apart from rounding, a result does not depend on the other matrices of its batch.
    In each row, trace(d H d^T) is at most that of rounding to nearest with clip search.

    weights: [B, N, K] floats, finite.
    second_moments: [B, K, K] float32, any scale, or None.
    tokens: [B] inputs seen.
    prepared: result of prepare_inputs for these moments; only if every matrix has tokens.
    Raises ValueError if the format does not fit, or its scales exceed float16.
    """
    with one_torch_thread() if weights.numel() < ONE_THREAD_WEIGHTS else nullcontext():
        return _quantize(weights.detach().float(), spec, second_moments, tokens, prepared)


def _quantize(
    weights: Tensor,
    spec: QuantSpec,
    second_moments: Tensor | None,
    tokens: Tensor | None,
    prepared: PreparedInputs | None,
) -> list[QuantizedMatrix]:
    """Round to nearest, then run GPTQ if there are tokens, then take the better result of each row."""
    counts = [0] * len(weights) if tokens is None or second_moments is None else [int(n) for n in tokens]
    importance = None if second_moments is None else second_moments.diagonal(dim1=1, dim2=2)
    nearest = [
        quantize_rtn(weight, spec, True, None if importance is None or not counts[at] else importance[at])
        for at, weight in enumerate(weights)
    ]
    seen = [at for at, count in enumerate(counts) if count]
    if second_moments is None or not seen:
        return nearest
    if prepared is None:
        prepared = prepare_inputs(second_moments[seen], [counts[at] for at in seen])
    best = {at: _Rows.of(weights[at], nearest[at], second_moments[at]) for at in seen}
    fits = spec.largest_code < REFITTED_CODES
    damped = [_damped(second_moments[at], counts[at]) if fits else None for at in seen]
    for _ in range(REFITS if spec.largest_code < FEW_CODES else 1):
        compensated = _compensate(weights, prepared, nearest, seen)
        for at, moment, codes in zip(seen, damped, compensated, strict=True):
            tried = QuantizedMatrix(spec, codes, nearest[at].scales, nearest[at].minima)
            if moment is not None:
                tried = refit(weights[at], tried, moment)
            best[at] = best[at].better(_Rows.of(weights[at], tried, second_moments[at]))
            nearest[at] = tried
    return [best[at].matrix if at in best else matrix for at, matrix in enumerate(nearest)]


def _damped(moment: Tensor, tokens: int) -> Tensor:
    """Return a second moment [K, K] over its mean diagonal, made positive definite."""
    damping = DAMPING if tokens >= len(moment) else SPARSE_DAMPING
    mean = moment.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (moment / mean).float() + damping * torch.eye(len(moment))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A matrix and the output error of each of its rows, [N]."""

    matrix: QuantizedMatrix
    errors: Tensor

    @classmethod
    def of(cls, weight: Tensor, matrix: QuantizedMatrix, moment: Tensor) -> _Rows:
        return cls(matrix, row_errors(weight, matrix.dequantize(), moment))

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


def _compensate(weights: Tensor, prepared: PreparedInputs, nearest: list[QuantizedMatrix], seen: list[int]) -> Tensor:
    """Return the codes of the matrices `seen` on the scales of `nearest`, uint8 [len(seen), N, K]."""
    spec, order, factors = nearest[0].spec, prepared.order, prepared.factors
    columns = order.shape[1]
    scales = torch.stack([nearest[at].scales.float() for at in seen])
    centre = float(spec.centre)
    minima = -scales * centre if spec.symmetric else torch.stack([_minima(nearest[at]) for at in seen])
    group = order // (columns // scales.shape[2])
    by_column = order[:, :, None].expand(-1, -1, weights.shape[1])
    work = weights[seen].transpose(1, 2).gather(1, by_column)
    by_group = group[:, :, None].expand_as(by_column)
    codes = _round_columns(
        work,
        factors,
        scales.transpose(1, 2).gather(1, by_group),
        minima.transpose(1, 2).gather(1, by_group),
        float(spec.largest_code),
    )
    back = order.argsort(dim=1)[:, :, None].expand_as(by_column)
    return codes.gather(1, back).transpose(1, 2).contiguous()


def _minima(matrix: QuantizedMatrix) -> Tensor:
    if matrix.minima is None:
        raise ValueError("an asymmetric matrix has minima")
    return matrix.minima.float()


def _round_columns(work: Tensor, factors: Tensor, scales: Tensor, minima: Tensor, most: float) -> Tensor:
    """Round column by column and return codes, uint8 [B, K, N].

    work: weights, [B, K, N]; overwritten.
    factors: [B, K, K].
    scales, minima: [B, K, N].
    """
    columns = work.shape[1]
    codes = torch.empty(work.shape, dtype=torch.uint8)
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).reciprocal_()
    for start in range(0, columns, _BLOCK_COLUMNS):
        end = min(start + _BLOCK_COLUMNS, columns)
        errors = torch.empty_like(work[:, start:end])
        for column in range(start, end):
            weight, scale, minimum = work[:, column], scales[:, column], minima[:, column]
            code = (weight - minimum).mul_(steps[:, column]).round_().clamp_(0.0, most)
            codes[:, column] = code
            error = (weight - torch.addcmul(minimum, code, scale)).div_(factors[:, column, column, None])
            errors[:, column - start] = error
            if column + 1 < end:
                work[:, column + 1 : end].addcmul_(
                    factors[:, column, column + 1 : end, None], error.unsqueeze(1), value=-1.0
                )
        if end < columns:
            work[:, end:].baddbmm_(factors[:, start:end, end:].transpose(1, 2), errors, alpha=-1.0)
    return codes


def inverse_factors(moments: Tensor, damping: Tensor) -> Tensor:
    """Return upper triangular U with U^T U = (H + damping * mean diagonal * I)^-1, [B, K, K].

    Columns without any input stay independent.
    damping: [B]. It is raised tenfold for a matrix whose H is still not positive definite in float32.
    Raises ValueError if no damping helps, because values are not finite.
    """
    moments = moments.clone()
    diagonal = moments.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1)
    diagonal[diagonal == 0] = 1.0
    original = diagonal.clone()
    damping = damping.clone()
    for _ in range(_DAMPING_TRIALS):
        diagonal.copy_(original + (damping * mean).unsqueeze(1))
        # Reversing rows and columns turns H = L L^T into H = M M^T with M upper triangular. U = M^-1.
        lower, failed = torch.linalg.cholesky_ex(moments.flip(1, 2))
        if not failed.any():
            identity = torch.eye(moments.shape[1]).expand_as(moments)
            factors: Tensor = torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
            return factors
        damping = torch.where(failed > 0, damping * _DAMPING_GROWTH, damping)
    raise ValueError("a second moment is not positive definite, expected finite inputs")
