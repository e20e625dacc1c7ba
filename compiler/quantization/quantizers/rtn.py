"""Round to nearest: scales from each group's range, each weight to its nearest code.

Shapes: N rows, K columns, G groups, g columns of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from moec.manifests.quant import QuantSpec

from ..quantized import QuantizedMatrix, RangeExceeded, on_bytes
from .column_steps import native_of

# Shrink factors of the clip search. The best factor for Gaussian rows of 64 is 1 at 8 bits and near 0.7 at 2 bits.
# At 1 bit it is near 0.3, because a code is then the mean of its half.
_SHRINK_FACTORS = tuple(1.0 - 0.05 * step for step in range(1, 13))
_SHRINK_FACTORS_1_BIT = tuple(1.0 - 0.05 * step for step in range(4, 18))
_CHUNK_WEIGHTS = 1 << 17  # the search makes a dozen passes over a chunk, which should fit in the level-2 cache
_ROWS_AT_ONCE = 2048  # bounds the float32 copy of a large embedding
_SMALLEST_NEGATIVE_HALF = -32767  # bit pattern 0x8001


def quantize_rtn(
    weight: torch.Tensor, spec: QuantSpec, clip_search: bool = False, importance: torch.Tensor | None = None
) -> QuantizedMatrix:
    """Round a matrix to the nearest codes.

    Without clip search: scales and minima are rounded outwards to float16 before codes are chosen.
    No weight is clipped. Each weight lies within scale / 2 of its value, up to float32 rounding:

        |w - w'| <= scale / 2 + 2**-22 * ((largest code + 1) * scale + |minimum|).

    A group of equal values that float16 holds is exact.

    With clip search: each group tries its own range and a dozen smaller ranges about the same centre. It takes the
    range with the least (weighted) squared error. The result is never worse than without clip search.

    Three values: the scale with the least error has a closed form, without a search.

    Byte scales: scales and minima are rounded once more, to nearest, before codes are chosen. Neither promise above
    then holds to the last bit.

    weight: [N, K] floats, finite.
    importance: [K], >= 0, weights of the columns in the clip search, or None for equal weights.
    Raises ValueError if the format does not fit.
    Raises RangeExceeded if its scales would exceed float16.
    """
    if weight.ndim != 2:
        raise ValueError(f"format {spec} cannot hold a matrix of shape {tuple(weight.shape)}")
    return nearest(weight.detach().float().T.contiguous(), spec, clip_search, importance).matrix()


@dataclass(frozen=True, slots=True)
class CodedColumns:
    """A quantized matrix column by column, as quantizers compute with it.

    codes: uint8 [K, N].
    scales, minima: float32 [G, N], values that float16 holds. Symmetric: minima are -scale * centre.
    """

    spec: QuantSpec
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor

    def matrix(self) -> QuantizedMatrix:
        """Return the matrix row by row."""
        codes, scales, minima = (
            values.T.contiguous() for values in (self.codes, self.scales.half(), self.minima.half())
        )
        return QuantizedMatrix(self.spec, codes, scales, None if self.spec.symmetric else minima)


def nearest(
    weights: torch.Tensor, spec: QuantSpec, clip_search: bool, importance: torch.Tensor | None = None
) -> CodedColumns:
    """Round weights, float32 [K, N]; see `quantize_rtn`."""
    columns, rows = weights.shape
    if spec.bitwidth == 16 or 0 in weights.shape or not spec.fits(columns):
        raise ValueError(f"format {spec} cannot hold a matrix of shape {(rows, columns)}")
    groups, native = spec.groups(columns), native_of(weights)
    shares = None if importance is None else importance.float()
    if native is None:
        grouped_shares = None if shares is None else shares.reshape(groups, -1)
        parts = torch.split(weights.T, max(1, _CHUNK_WEIGHTS // columns))
        chunks = [_quantize_rows(part, spec, clip_search, grouped_shares) for part in parts]
        codes, scales, minima = (torch.cat(parts).T.contiguous() for parts in zip(*chunks, strict=True))
    else:
        codes = torch.empty_like(weights, dtype=torch.uint8)
        scales, minima = (weights.new_empty(groups, rows) for _ in range(2))
        factors = _factors(spec) if clip_search else ()
        native.search_ranges(
            weights.numpy(), (weights.new_ones(columns) if shares is None else shares.contiguous()).numpy(),
            np.array(factors, np.float32), spec.largest_code, spec.centre if spec.symmetric else 0, spec.symmetric,
            spec.is_ternary and clip_search, scales.numpy(), minima.numpy(),
        )  # fmt: skip
        if not (torch.isfinite(scales).all() and torch.isfinite(minima).all()):
            raise _exceeded(weights, spec)
    if spec.byte_scales:
        scales, minima = (half.T.float().contiguous() for half in on_bytes(scales.T, minima.T, spec.largest_code))
    if native is not None:
        native.nearest_codes(weights.numpy(), scales.numpy(), minima.numpy(), spec.largest_code, codes.numpy())
    elif spec.byte_scales:
        grouped = weights.T.reshape(rows, groups, -1)
        codes = _codes(grouped, scales.T, minima.T, spec).to(torch.uint8).reshape(rows, columns).T.contiguous()
    return CodedColumns(spec, codes, scales, minima)


def _quantize_rows(
    weight: torch.Tensor, spec: QuantSpec, clip_search: bool, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes uint8 [N, K], scales and minima float32 [N, G] of some rows. It is what the extension computes.

    importance: [G, g] or None.
    """
    rows, columns = weight.shape
    groups = spec.groups(columns)
    grouped = weight.float().reshape(rows, groups, columns // groups)
    low, high = _range(grouped, spec.symmetric)
    scales, minima = _grid(low, high, spec)
    codes = _codes(grouped, scales, minima, spec)
    if clip_search:
        best = _error(grouped, codes, scales, minima, importance)
        for trial_low, trial_high in _ranges(grouped, low, high, spec, importance):
            trial_scales, trial_minima = _grid(trial_low, trial_high, spec)
            trial_codes = _codes(grouped, trial_scales, trial_minima, spec)
            error = _error(grouped, trial_codes, trial_scales, trial_minima, importance)
            better = error < best
            best = torch.where(better, error, best)
            scales = torch.where(better, trial_scales, scales)
            minima = torch.where(better, trial_minima, minima)
        codes = _codes(grouped, scales, minima, spec)
    return codes.to(torch.uint8).reshape(rows, columns), scales, minima


def _ranges(
    grouped: torch.Tensor, low: torch.Tensor, high: torch.Tensor, spec: QuantSpec, weights: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the ranges that the clip search tries in addition to low to high, [N, G] each.

    weights: [G, g] or None.
    """
    if spec.is_ternary:
        best = _best_of_three(grouped, weights)
        yield -best, best
        return
    centre, half = (low + high) / 2, (high - low) / 2
    for factor in _factors(spec):
        yield centre - factor * half, centre + factor * half


def _factors(spec: QuantSpec) -> tuple[float, ...]:
    return _SHRINK_FACTORS_1_BIT if spec.bitwidth == 1 else _SHRINK_FACTORS


def _best_of_three(grouped: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the best scale a of each group: [N, G, g] -> [N, G].

    It minimises sum w (x - a t)^2 over t in -1, 0, 1. The nonzero t belong to the k weights of largest magnitude, for
    some k. Let S = sum w |x| and W = sum w over these weights. The best a is S / W, and it lowers the error by S^2 / W.
    All k are therefore tried at once.
    """
    magnitudes, order = grouped.abs().sort(dim=-1, descending=True, stable=True)
    share = torch.ones_like(grouped) if weights is None else weights.expand_as(grouped).gather(-1, order)
    mass = share.cumsum(-1).clamp_min_(torch.finfo(torch.float32).tiny)
    sums = (share * magnitudes).cumsum(-1)
    best = (sums.square() / mass).argmax(-1, keepdim=True)
    return (sums.gather(-1, best) / mass.gather(-1, best)).squeeze(-1)


def rounded_rows(weight: torch.Tensor, spec: QuantSpec) -> Iterator[tuple[torch.Tensor, QuantizedMatrix]]:
    """Yield a matrix rounded with clip search, a bounded number of rows at a time: rows [n, K] float32 and their codes.

    Rows are independent, so all pieces together equal `quantize_rtn` of the whole matrix.
    """
    for piece in torch.split(weight, _ROWS_AT_ONCE):
        rows = piece.float()
        yield rows, quantize_rtn(rows, spec, clip_search=True)


def holds(weight: torch.Tensor, spec: QuantSpec) -> bool:
    """Return whether the scales of a format that fits a matrix hold its values. mxfp4 and 16 bits are not checked."""
    if spec.bitwidth == 16 or spec.is_mxfp4 or spec.is_pruned:
        return True
    for piece in torch.split(weight, _ROWS_AT_ONCE):
        grouped = piece.float().reshape(len(piece), spec.groups(piece.shape[1]), -1)
        try:
            _grid(*_range(grouped, spec.symmetric), spec)
        except RangeExceeded:
            return False
    return True


def _range(grouped: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range of each group: [N, G, g] -> [N, G]. Symmetric: plus and minus the largest magnitude."""
    low, high = grouped.amin(-1), grouped.amax(-1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    return low, high


def _grid(low: torch.Tensor, high: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima that cover low to high, float32 values that float16 holds, [N, G] each.

    Symmetric: scale = high / (largest code - centre), minimum = -scale * centre.
    Raises RangeExceeded beyond float16. Source: docs/format.md, Packing.
    """
    if spec.symmetric:
        scales = _half_above(high / float(spec.largest_code - spec.centre))
        minima = -scales * float(spec.centre)
    else:
        minima = _half_below(low)
        scales = _half_above((high - minima) / float(spec.largest_code))
    if not (torch.isfinite(scales).all() and (spec.symmetric or torch.isfinite(minima).all())):
        raise _exceeded(torch.maximum(high.abs(), low.abs()), spec)
    return scales, minima


def _exceeded(weights: torch.Tensor, spec: QuantSpec) -> RangeExceeded:
    return RangeExceeded(f"weights up to {float(weights.abs().max()):.3g} exceed the float16 scales of format {spec}")


def _codes(grouped: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Return the nearest codes, ties to even, float32 [N, G, g]."""
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(-1)
    return ((grouped - minima.unsqueeze(-1)) / divisor).round_().clamp_(0, float(spec.largest_code))


def _error(
    grouped: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return the squared error of each group, weighted by column, [N, G]."""
    error = torch.addcmul(minima.unsqueeze(-1), codes, scales.unsqueeze(-1)).sub_(grouped).square_()
    return (error if weights is None else error.mul_(weights)).sum(-1)


def _half_above(values: torch.Tensor) -> torch.Tensor:
    """Return the least float16 value >= each of `values` >= 0, as float32."""
    half = values.half()
    below = half.float() < values
    return (half.view(torch.int16) + below.to(torch.int16)).view(torch.float16).float()


def _half_below(values: torch.Tensor) -> torch.Tensor:
    """Return the greatest float16 value <= each of `values`, as float32."""
    half = values.half()
    bits = half.view(torch.int16)
    next_below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, _SMALLEST_NEGATIVE_HALF))
    return torch.where(half.float() > values, next_below.to(torch.int16), bits).view(torch.float16).float()
