"""Products of packed matrices in numpy. A quantized matrix reads activations rounded to 8 bits.

Shape letters: T tokens, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moec.manifests.quant import COLUMNS_PER_TILE

from ..packed_matrix import Floats, Int64s, PackedMatrix, check_array, check_indices, check_shape, require, unpack
from .bfloat_products import Order, bfloat_product
from .matmul import matmul

_SMALLEST_ROUNDED = np.float32(2.0**-110)  # largest value of a tile; 127 divided by less could overflow


def weights_of(matrix: PackedMatrix) -> Floats:
    """Return the weights of a matrix, float32 [N, K]."""
    return unpack(matrix.data, matrix.rows, matrix.columns, matrix.spec)


def round_activations(x: Floats) -> Floats:
    """Round activations to 8 bits per tile of 32 columns, as quantized matrices read them. Returns codes times steps.

    x: [T, K], K a multiple of 32.
    step = max |x| / 127 of the tile; code = x * (127 / max |x|), to nearest even.
    A tile becomes zero if all its magnitudes are below 2^-110, and NaN if a value is not finite.
    """
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // COLUMNS_PER_TILE, COLUMNS_PER_TILE)
    largest = np.abs(tiles).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(largest >= _SMALLEST_ROUNDED, np.float32(127) / largest, np.float32(0))
        codes = np.rint(np.clip(tiles * inverse, -127, 127))
        rounded = codes * (np.where(np.isfinite(largest), largest, np.float32(np.nan)) / np.float32(127))
    return np.asarray(rounded, np.float32).reshape(x.shape)


def read_by(matrix: PackedMatrix, x: Floats) -> Floats:
    """Return activations as a matrix reads them: rounded to 8 bits if the matrix is quantized. x: [..., K]."""
    return x if matrix.spec.bitwidth == 16 else round_activations(x)


def _product(weights: Floats, x: Floats, out: Floats) -> None:
    for row, target in zip(x, out, strict=True):
        target[:] = matmul(weights, row)  # token by token, so that the sums do not depend on the batch


def products_of(matrix: PackedMatrix, x: Floats, reads_bfloats: bool = False) -> Floats:
    """Return x W^T, float32 [T, N].

    reads_bfloats: a bfloat16 matrix reads x rounded to bfloat16 (`bfloat_product`).
    """
    weights = weights_of(matrix)
    if reads_bfloats and matrix.spec.float_type == "bfloat16":
        return bfloat_product(weights, x)
    out = np.empty((len(x), matrix.rows), np.float32)
    _product(weights, read_by(matrix, x), out)
    return out


def linear_of_bfloats(matrix: PackedMatrix, x: Floats, out: Floats, order: Order = "avx512bf16") -> None:
    """Multiply: out = x W^T, with x rounded to bfloat16.

    matrix: of bfloat16.
    x: [T, K].
    out: [T, N], written.
    order: see `bfloat_product`.
    Raises ValueError for another format or wrong shapes.
    """
    require(matrix.spec.float_type == "bfloat16", f"matrix: expected bfloat16, found {matrix.spec}")
    check_array(x, "x", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    check_shape(x, "x", (x.shape[0], matrix.columns))
    check_shape(out, "out", (x.shape[0], matrix.rows))
    out[:] = bfloat_product(weights_of(matrix), x, order)


def linear(matrix: PackedMatrix, x: Floats, out: Floats) -> None:
    """Multiply: out = x W^T. A quantized matrix reads x rounded to 8 bits (`round_activations`).

    x: [T, K].
    out: [T, N], written.
    Raises ValueError for wrong shapes.
    """
    check_array(x, "x", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    check_shape(x, "x", (x.shape[0], matrix.columns))
    check_shape(out, "out", (x.shape[0], matrix.rows))
    _product(weights_of(matrix), read_by(matrix, x), out)


def linears(matrices: Sequence[PackedMatrix], x: Floats, outs: Sequence[Floats]) -> None:
    """Multiply one input with several matrices: outs[i] = x W_i^T.

    matrices: 1 to 8, with K columns each.
    x: [T, K].
    outs: one [T, N_i] per matrix, written.
    Raises ValueError.
    """
    require(0 < len(matrices) <= 8 and len(outs) == len(matrices), "matrices: expected 1 to 8 and as many outputs")
    for matrix, out in zip(matrices, outs, strict=True):
        linear(matrix, x, out)


def dequantize_rows(matrix: PackedMatrix, rows: Int64s, out: Floats) -> None:
    """Dequantize rows: out[i] = row rows[i] of the matrix.

    rows: int64[n].
    out: [n, K], written.
    Raises ValueError.
    """
    check_array(rows, "rows", np.int64, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(out, "out", (rows.size, matrix.columns))
    check_indices(rows, "rows", matrix.rows)
    out[:] = weights_of(matrix)[rows]
