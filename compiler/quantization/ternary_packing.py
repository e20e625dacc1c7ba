"""Conversion between codes of three values and bytes. A byte holds five codes, the digits of a base-3 fraction.

Source: docs/format.md, Packing.
Shapes: N rows, a multiple of 16; K columns, a multiple of 64; B row blocks, T tiles of a row.
"""

from __future__ import annotations

import numpy as np

from moec.manifests.quant import ROWS_PER_BLOCK

_LANE_BYTES = 4
_PLANES, _DIGITS = 3, 5
_VALUES = 3**_DIGITS
_LANES = _PLANES * _DIGITS + 1  # the last lane takes one byte per row, two bits per code
_PLANE_BYTES = ROWS_PER_BLOCK * _LANE_BYTES
_PLACES = 3 ** np.arange(_DIGITS - 1, -1, -1, dtype=np.uint16)
_PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


def pack_ternary(codes: np.ndarray) -> np.ndarray:
    """Pack codes 0 to 2 into tiles: uint8 [N, K] -> uint8 [B, T, 208].

    Five codes form the base-3 number v, with the first code as the highest digit. Their byte is the least b with
    b / 256 >= v / 243. A product with 3 then gives each digit in turn.
    """
    lanes = codes.reshape(-1, ROWS_PER_BLOCK, codes.shape[1] // (_LANES * _LANE_BYTES), _LANES, _LANE_BYTES)
    lanes = lanes.transpose(0, 2, 3, 1, 4)
    digits = lanes[:, :, :-1].reshape(*lanes.shape[:2], _PLANES, _DIGITS, _PLANE_BYTES)
    numbers = np.tensordot(digits.astype(np.uint16), _PLACES, axes=([3], [0]))
    packed = np.empty((*lanes.shape[:2], _PLANES * _PLANE_BYTES + ROWS_PER_BLOCK), np.uint8)
    packed[..., :-ROWS_PER_BLOCK] = ((numbers * 256 + _VALUES - 1) // _VALUES).reshape(*lanes.shape[:2], -1)
    packed[..., -ROWS_PER_BLOCK:] = np.bitwise_or.reduce(lanes[:, :, -1] << _PAIR_SHIFTS, axis=-1)
    return packed


def unpack_ternary(tiles: np.ndarray) -> np.ndarray:
    """Invert `pack_ternary`: uint8 [B, T, 208] -> uint8 [N, K]."""
    blocks, count, _ = tiles.shape
    left = tiles[..., :-ROWS_PER_BLOCK].reshape(blocks, count, _PLANES, _PLANE_BYTES)
    digits = np.empty((blocks, count, _PLANES, _DIGITS, _PLANE_BYTES), np.uint8)
    for digit in range(_DIGITS):
        tripled = left.astype(np.uint16) * np.uint16(3)  # numpy 1 would return bytes for bytes times a small number
        digits[:, :, :, digit] = tripled >> 8
        left = tripled & np.uint16(255)
    last = tiles[..., -ROWS_PER_BLOCK:, np.newaxis] >> _PAIR_SHIFTS & np.uint8(3)
    parts = (digits.reshape(blocks, count, -1, _PLANE_BYTES), last.reshape(blocks, count, 1, _PLANE_BYTES))
    lanes = np.concatenate(parts, axis=2).reshape(blocks, count, _LANES, ROWS_PER_BLOCK, _LANE_BYTES)
    return np.asarray(lanes.transpose(0, 3, 1, 2, 4).reshape(blocks * ROWS_PER_BLOCK, -1))
