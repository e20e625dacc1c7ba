"""Products of bfloat16 weights with activations rounded to bfloat16, in numpy: the specification of bits.

The processors' instructions define the order of a sum, its roundings, and what happens to subnormal numbers.
Shape letters: T tokens, N rows, K columns.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from moec.manifests.quant import COLUMNS_PER_TILE

from ..packed_matrix import Floats

Order = Literal["avx512bf16", "amx-bf16"]

_SMALLEST_NORMAL = np.float32(2.0**-126)
_LEAST_ROUNDED_UP = 2.0**-126 * (1 - 2.0**-25)  # rounds to the smallest normal number; anything below it is tiny
_QUIET = np.uint32(0x00400000)
_UPPER = np.uint32(0xFFFF0000)


def flushed(x: Floats) -> Floats:
    """Return x with subnormal numbers replaced by zeros of their sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def round_to_bfloat16(x: Floats) -> Floats:
    """Round to bfloat16, to nearest even. Subnormal numbers become zeros, NaN stays NaN. Returns float32.

    Error: at most |x| / 257 from 2^-126 on; |x| below. Numbers of at least 2^128 (1 - 2^-9) become infinite.
    Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VCVTNEPS2BF16.
    """
    bits = np.ascontiguousarray(flushed(x), np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.where(np.isnan(x), bits | _QUIET, bits + np.uint32(0x7FFF) + odd) & _UPPER
    return np.asarray(rounded, np.uint32).view(np.float32)


def fma_flushed(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a b + c, rounded once to nearest even; a subnormal result becomes a zero of its sign.

    a, b: bfloat16 values, so that their product is exact in float64. c: float32. None is subnormal.
    The sum in float64 is exact, or one of its operands is too small to decide a rounding to float32.
    """
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        is_tiny = np.abs(wide) < _LEAST_ROUNDED_UP
        return np.where(is_tiny, np.copysign(np.float32(0), wide), wide).astype(np.float32)


def bfloat_product(weights: Floats, x: Floats, order: Order = "avx512bf16") -> Floats:
    """Return x W^T with x rounded to bfloat16, float32 [T, N].

    weights: bfloat16 values, float32 [N, K].
    x: float32 [T, K].
    order: the instruction whose order of sums is used.

    avx512bf16: acc = 0. For each pair of columns in order, add the product of the second column, then of the first.
    amx-bf16: acc = 0. For each tile of 32 columns in order, sum the products of even and of odd columns apart, in
    order from zero. Then add their sum to acc.

    Missing columns of a pair or tile count as zeros.
    Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS and TDPBF16PS.
    """
    width = 2 if order == "avx512bf16" else COLUMNS_PER_TILE
    rest = -x.shape[1] % width
    read = np.pad(round_to_bfloat16(x), ((0, 0), (0, rest)))[:, None, :]
    held = np.pad(flushed(weights), ((0, 0), (0, rest)))[None, :, :]
    total = np.zeros((len(x), len(weights)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, read.shape[2], width):
            if order == "avx512bf16":
                for column in (first + 1, first):
                    total = fma_flushed(held[:, :, column], read[:, :, column], total)
                continue
            sums = [np.zeros_like(total), np.zeros_like(total)]
            for column in range(first, first + width):
                half = column % 2
                sums[half] = fma_flushed(held[:, :, column], read[:, :, column], sums[half])
            total = _add_flushed(total, _add_flushed(*sums))
    return total


def _add_flushed(a: Floats, b: Floats) -> Floats:
    """Return a + b, rounded to nearest even; a subnormal result becomes a zero of its sign."""
    return fma_flushed(a, np.ones_like(a), b)
