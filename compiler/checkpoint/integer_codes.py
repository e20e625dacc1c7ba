"""Weights that a checkpoint stores as integer codes: what the codes stand for, and which formats of moec hold them.

A weight is scale x (code - zero), with one scale and one zero for each group of a row.
Shapes: N rows, K columns, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moec.manifests.quant import COLUMNS_PER_TILE, QuantSpec

Parts = Mapping[str, Tensor]
_HOLDING_BITS = (2, 3, 4, 5, 6, 8)
"""Bitwidths of the formats that may hold codes exactly, smallest first."""

_LARGEST_ZERO = 256


@dataclass(frozen=True, slots=True)
class IntegerGrid:
    """The numbers that the codes of a matrix may stand for.

    bits: codes are 0 to 2^bits - 1.
    zeros, scales: float32 [N, G].
    group_of: group of each column, int64 [K].
    minima: float32 [N, G], added to scale x code in place of zeros; None: zeros decide.
    """

    bits: int
    zeros: Tensor
    scales: Tensor
    group_of: Tensor
    minima: Tensor | None = None

    def values(self, codes: Tensor) -> Tensor:
        """Return the weights of codes [N, K], float32."""
        if self.minima is not None:
            return codes.float() * self._by_column(self.scales) + self._by_column(self.minima)
        zeros, scales = (self._by_column(numbers) for numbers in (self.zeros, self.scales))
        return (codes.float() - zeros) * scales

    def _by_column(self, values: Tensor) -> Tensor:
        """Return numbers of groups for each column, [N, K], or [N, 1] if there is one group."""
        return values if values.shape[1] == 1 else values[:, self.group_of]

    def need(self) -> CodeNeed:
        """Return what a format needs to hold any codes of this grid."""
        columns, groups = len(self.group_of), self.scales.shape[1]
        size = columns // groups
        in_order = columns % groups == 0 and torch.equal(self.group_of, torch.arange(columns) // max(size, 1))
        if self.minima is not None:
            halves = is_half(self.scales), is_half(self.minima)
            return CodeNeed(self.bits, columns, size if in_order else 0, None, *halves)
        is_whole = bool(((self.zeros == self.zeros.round()) & (self.zeros.abs() <= _LARGEST_ZERO)).all())
        return CodeNeed(
            self.bits,
            columns,
            size if in_order and is_whole else 0,
            (int(self.zeros.min()), int(self.zeros.max())) if is_whole else (0, 0),
            is_half(self.scales),
            is_half(self.zeros * self.scales),
        )


@dataclass(frozen=True, slots=True)
class CodeNeed:
    """Requirements for a format that holds any codes of a matrix: to the last bit, unless it rounds scales.

    bits: codes are 0 to 2^bits - 1.
    columns: columns of the matrix.
    group_size: columns of a group. 0 if groups are not runs of columns, or if zeros are not whole numbers.
    zeros: the least and the largest zero; None: minima stand in place of zeros, which no symmetric format holds.
    has_half_scales: float16 holds all scales.
    has_half_minima: float16 holds all minima, or all products of scale and zero.
    rounds_scales: scales and minima have more bits than float16. Rounded, they move weights by a fiftieth of a code.
    """

    bits: int
    columns: int
    group_size: int
    zeros: tuple[int, int] | None
    has_half_scales: bool
    has_half_minima: bool
    rounds_scales: bool = False

    def is_met_by(self, spec: QuantSpec) -> bool:
        """Return whether this format holds all codes, and scales as float16 has them. Its groups may be finer."""
        has_plain_scales = spec.bitwidth not in (0, 16) and not (spec.is_mxfp4 or spec.byte_scales)
        has_scales = self.has_half_scales or self.rounds_scales
        if not has_scales or not has_plain_scales or not spec.fits(self.columns):
            return False
        if not self.group_size or self.group_size % (spec.group_size or self.columns):
            return False
        largest = (1 << self.bits) - 1
        if not spec.symmetric:
            return (self.has_half_minima or self.rounds_scales) and largest <= spec.largest_code
        if self.zeros is None:
            return False
        low, high = self.zeros
        return high <= spec.centre and largest - low <= spec.largest_code - spec.centre

    def least_format(self) -> QuantSpec | None:
        """Return the format of fewest bits that holds the codes, symmetric if it has zeros; None if no format does."""
        group = 0 if self.group_size == self.columns else self.group_size
        if group % COLUMNS_PER_TILE:
            return None
        is_symmetric = self.zeros is not None
        formats = (QuantSpec(bits, group, symmetric=is_symmetric) for bits in _HOLDING_BITS)
        return next(filter(self.is_met_by, formats), None)


@dataclass(frozen=True, slots=True)
class IntegerLayout:
    """The place of a weight's codes in its parts.

    part: the part with the codes. The others, which are small, give the grid.
    codes: (parts) -> codes, uint8 [N, K].
    grid: (parts without the codes) -> the grid.
    need: what a format needs, if the type of the weight says it; None: the grid does.
    """

    part: str
    codes: Callable[[Parts], Tensor]
    grid: Callable[[Parts], IntegerGrid]
    need: CodeNeed | None = None


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """The codes of one matrix, uint8 [N, K], and their grid."""

    codes: Tensor
    grid: IntegerGrid

    def select(self, start: int, stop: int) -> IntegerCodes:
        """Return some of the rows."""
        grid, rows = self.grid, slice(start, stop)
        minima = None if grid.minima is None else grid.minima[rows]
        selected = replace(grid, zeros=grid.zeros[rows], scales=grid.scales[rows], minima=minima)
        return IntegerCodes(self.codes[rows], selected)


def is_half(values: Tensor) -> bool:
    """Return whether float16 holds all of these finite numbers."""
    half = values.half()
    return bool((torch.isfinite(half) & (half.float() == values)).all())
