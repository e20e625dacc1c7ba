"""Packed weight matrices in numpy, and checks of arrays that all kernels share.

The bytes are those of docs/format.md, Packing. A matrix is unpacked on each call; nothing is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moec.manifests.quant import ROWS_PER_BLOCK, QuantSpec, round_up

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_PLANE_BYTES = 4 * ROWS_PER_BLOCK
_COLUMNS_PER_LANE = 4
_EXPONENT_BIAS = 127
_TERNARY_PLANES, _TERNARY_DIGITS = 3, 5
MXFP4_CENTRE = 12
"""The level that stands for the weight 0."""
MXFP4_LEVELS = np.array([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], np.uint8)
"""The level of each code: twice its 4-bit float, plus MXFP4_CENTRE."""


def require(holds: bool, message: str) -> None:
    """Raise ValueError with this message unless a condition holds."""
    if not holds:
        raise ValueError(message)


def check_array(array: np.ndarray, name: str, dtype: type, dimensions: int) -> None:
    """Check dtype, rank and memory order of an array. Raises ValueError."""
    # Messages are built only when needed, because this runs in every layer for every token.
    if array.dtype != dtype:
        raise ValueError(f"{name}: expected {np.dtype(dtype).name}, found {array.dtype}")
    if array.ndim != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimensions, found {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected C-contiguous memory")


def check_shape(array: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
    """Check the shape of an array. Raises ValueError."""
    require(array.shape == shape, f"{name}: expected shape {shape}, found {array.shape}")


def check_indices(indices: NDArray[np.signedinteger], name: str, count: int) -> None:
    """Check that all indices are in 0 .. count - 1. Raises ValueError."""
    outside = indices.size > 0 and bool((indices < 0).any() or (indices >= count).any())
    require(
        not outside,
        f"{name}: expected indices below {count}, found {indices.min(initial=0)} to {indices.max(initial=0)}",
    )


class PackedMatrix:
    """A weight matrix in layout `rows16`. The caller owns the memory.

    data: uint8[packed_bytes], kept by reference and never written.
    rows, columns: size of the matrix, without row padding.
    spec: format of the weights.
    Raises ValueError if the buffer does not have exactly the bytes of the format.
    Source: docs/format.md, Packing.
    """

    __slots__ = ("columns", "data", "rows", "spec")

    def __init__(self, data: Bytes, rows: int, columns: int, spec: QuantSpec) -> None:
        check_array(data, "data", np.uint8, 1)
        expected = spec.packed_bytes(rows, columns)
        require(data.size == expected, f"data: {rows} x {columns} in {spec} takes {expected} bytes, found {data.size}")
        self.data = data
        self.rows = rows
        self.columns = columns
        self.spec = spec

    def move_to(self, data: Bytes) -> None:
        """Use other memory for the same matrix, uint8[packed_bytes]. Raises ValueError if the size differs."""
        check_array(data, "data", np.uint8, 1)
        require(data.size == self.data.size, "data: expected as many bytes as before")
        self.data = data


def _crumbs(planes: Bytes, bits: int) -> Bytes:
    """Split bytes into fields of `bits` bits, lowest first, along a new third axis.

    planes: uint8[tiles, planes, 64] -> uint8[tiles, planes, 8 / bits, 64].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray((planes[:, :, None, :] >> shifts) & np.uint8(2**bits - 1))


def _ternary_lanes(tiles: Bytes) -> Bytes:
    """Return the codes of three-valued tiles, uint8[n, 208] -> uint8[n, 16, 64]. Source: docs/format.md, Packing."""
    fractions = tiles[:, : _TERNARY_PLANES * _PLANE_BYTES].reshape(-1, _TERNARY_PLANES, 1, _PLANE_BYTES)
    digits = []
    for _ in range(_TERNARY_DIGITS):
        tripled = fractions.astype(np.uint16) * np.uint16(3)  # in numpy 1, bytes times a small int stay bytes
        digits.append((tripled >> 8).astype(np.uint8))
        fractions = tripled.astype(np.uint8)
    lanes = np.concatenate(digits, axis=2).reshape(len(tiles), -1, _PLANE_BYTES)
    rows = tiles[:, _TERNARY_PLANES * _PLANE_BYTES :, np.newaxis]
    last = rows >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    return np.concatenate((lanes, last.reshape(len(tiles), 1, _PLANE_BYTES)), axis=1)


def _tile_codes(tiles: Bytes, spec: QuantSpec) -> Bytes:
    """Return the codes of tiles, uint8[n, bytes] -> uint8[n, 16, tile columns]. Source: docs/format.md, Packing."""
    if spec.is_ternary:
        lanes = _ternary_lanes(tiles)
    else:
        low, *high = spec.plane_bits
        planes = tiles.reshape(len(tiles), -1, _PLANE_BYTES)
        lanes = _crumbs(planes[:, :low], low).reshape(len(tiles), -1, _PLANE_BYTES)
        for bits in high:
            lanes = lanes | _crumbs(planes[:, low:], bits).reshape(lanes.shape) << np.uint8(low)
    # Axes of lanes: tile, q, byte 4 r + c. Row r, column k = 4 q + c.
    by_lane = lanes.reshape(len(tiles), -1, ROWS_PER_BLOCK, _COLUMNS_PER_LANE)
    return np.asarray(by_lane.transpose(0, 2, 1, 3).reshape(len(tiles), ROWS_PER_BLOCK, spec.tile_columns))


def _groups(data: Bytes, rows: int, columns: int, spec: QuantSpec) -> tuple[Bytes, Floats, Floats]:
    """Return tiles, scales and minima: uint8[blocks, G, tiles, bytes], float32[blocks, G, 16] twice."""
    blocks, groups = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK, spec.groups(columns)
    scale_bytes = 2 * ROWS_PER_BLOCK
    head = spec.block_header_bytes * ROWS_PER_BLOCK
    by_block = data.reshape(blocks, -1)
    records = by_block[:, head:].reshape(blocks, groups, -1)
    if spec.is_mxfp4:
        exponents = records[:, :, :ROWS_PER_BLOCK].astype(np.int32) - _EXPONENT_BIAS
        scales = np.ldexp(np.float32(0.5), exponents).astype(np.float32)
        tiles = records[:, :, ROWS_PER_BLOCK:].reshape(blocks, groups, -1, ROWS_PER_BLOCK * spec.tile_row_bytes)
        return tiles, scales, scales * np.float32(-MXFP4_CENTRE)
    if spec.byte_scales:  # exponents, and later bytes: first of scales, then of minima
        steps = np.ldexp(np.float32(1), by_block[:, :head].astype(np.int32) - _EXPONENT_BIAS).astype(np.float32)
        values = records[:, :, :scale_bytes] * steps[:, np.newaxis]
        tiles = records[:, :, scale_bytes:].reshape(blocks, groups, -1, ROWS_PER_BLOCK * spec.tile_row_bytes)
        return tiles, values[:, :, :ROWS_PER_BLOCK], -values[:, :, ROWS_PER_BLOCK:]
    scales = records[:, :, :scale_bytes].copy().view("<f2").astype(np.float32)
    if spec.symmetric:
        minima, start = scales * np.float32(-spec.centre), scale_bytes
    else:
        minima, start = (
            records[:, :, scale_bytes : 2 * scale_bytes].copy().view("<f2").astype(np.float32),
            2 * scale_bytes,
        )
    return records[:, :, start:].reshape(blocks, groups, -1, ROWS_PER_BLOCK * spec.tile_row_bytes), scales, minima


def unpack_codes(data: Bytes, rows: int, columns: int, spec: QuantSpec) -> Bytes:
    """Return the codes of a quantized matrix, uint8[rows, columns]. For mxfp4 they are levels (MXFP4_LEVELS).

    Codes and levels are linear in the weights of a group.
    data: uint8[packed_bytes].
    Raises ValueError for 16-bit formats and wrong sizes.
    Source: docs/format.md, Packing.
    """
    require(spec.bitwidth != 16, "a 16-bit matrix has no codes")
    PackedMatrix(data, rows, columns, spec)
    tiles, _, _ = _groups(data, rows, columns, spec)
    blocks = tiles.shape[0]
    codes = _tile_codes(tiles.reshape(-1, tiles.shape[-1]), spec)
    if spec.is_mxfp4:
        codes = MXFP4_LEVELS[codes]
    by_block = codes.reshape(blocks, columns // spec.tile_columns, ROWS_PER_BLOCK, spec.tile_columns)
    return np.asarray(by_block.transpose(0, 2, 1, 3).reshape(-1, columns)[:rows])


def _unpack_16_bit(data: Bytes, columns: int, spec: QuantSpec) -> Floats:
    if spec.float_type == "bfloat16":
        values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = data.view("<f2").astype(np.float32)
    return np.asarray(values.reshape(-1, columns, ROWS_PER_BLOCK).transpose(0, 2, 1).reshape(-1, columns))


def unpack(data: Bytes, rows: int, columns: int, spec: QuantSpec) -> Floats:
    """Return the weights of a packed matrix, float32[rows, columns].

    Each weight is rounded once, as by fmaf: scale * code + minimum is exact in float64 (at most 49 bits).
    data: uint8[packed_bytes].
    Raises ValueError for wrong sizes.
    Source: docs/format.md, Packing.
    """
    PackedMatrix(data, rows, columns, spec)
    if spec.bitwidth == 16:
        return _unpack_16_bit(data, columns, spec)[:rows]
    codes = unpack_codes(data, rows, columns, spec)
    _, scales, minima = _groups(data, rows, columns, spec)
    groups = scales.shape[1]
    row_scales = scales.transpose(0, 2, 1).reshape(-1, groups, 1)[:rows].astype(np.float64)
    row_minima = minima.transpose(0, 2, 1).reshape(-1, groups, 1)[:rows].astype(np.float64)
    weights = row_scales * codes.reshape(rows, groups, -1) + row_minima
    return np.asarray(weights.astype(np.float32).reshape(rows, columns))
