"""Conversion between matrices and bytes: layout `rows16` of docs/format.md, section Packing.

Shapes: N rows, K columns, B row blocks of 16, T tiles of a row, G groups, g columns of a group.
"""

from __future__ import annotations

import numpy as np
import torch

from moec.manifests.quant import COLUMNS_PER_TILE, MXFP4_EXPONENTS, ROWS_PER_BLOCK, QuantSpec, round_up

from .quantized import EXPONENT_BIAS, QuantizedMatrix, bytes_of, left_out

_LANE_BYTES = 4
_LANES_PER_TILE = COLUMNS_PER_TILE // _LANE_BYTES
# Three values: a byte holds five codes, the digits of a base-3 fraction.
_PLANES, _DIGITS = 3, 5
_VALUES = 3**_DIGITS
_LANES = _PLANES * _DIGITS + 1  # the last lane takes one byte per row, two bits per code
_PLANE_BYTES = ROWS_PER_BLOCK * _LANE_BYTES
_PLACES = 3 ** np.arange(_DIGITS - 1, -1, -1, dtype=np.uint16)
_PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)
_FLOAT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def pack(matrix: QuantizedMatrix) -> np.ndarray:
    """Return the bytes of a quantized matrix, uint8, `spec.packed_bytes(N, K)` of them.

    Raises ValueError if codes, scales or minima have another shape, type or range than the format requires.
    Source: docs/format.md, Packing.
    """
    spec = matrix.spec
    if spec.is_pruned:
        return np.empty(0, np.uint8)
    codes, scales, minima = _checked(matrix)
    rows, columns = codes.shape
    groups = spec.groups(columns)
    blocks = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK
    parts, exponents = [scales] if minima is None else [scales, minima], np.empty((blocks, 0), "<u4")
    if spec.byte_scales:
        parts, exponents = _byte_parts(matrix)
    header_lanes = spec.group_header_bytes * ROWS_PER_BLOCK // _LANE_BYTES
    code_lanes = columns // groups // spec.tile_columns * spec.tile_row_bytes * ROWS_PER_BLOCK // _LANE_BYTES
    lanes = np.empty((blocks, groups, header_lanes + code_lanes), dtype="<u4")
    for index, header in enumerate(parts):
        start = index * header_lanes // len(parts)
        padded = _pad_rows(header).reshape(blocks, ROWS_PER_BLOCK, groups).transpose(0, 2, 1)
        lanes[:, :, start : start + header_lanes // len(parts)] = np.ascontiguousarray(padded).view("<u4")
    if spec.is_ternary:
        lanes[:, :, header_lanes:] = pack_ternary(_pad_rows(codes)).reshape(blocks, groups, -1).view("<u4")
    else:
        _pack_codes(_pad_rows(codes), spec, lanes[:, :, header_lanes:])
    if exponents.size:
        return np.concatenate((exponents, lanes.reshape(blocks, -1)), axis=1).reshape(-1).view(np.uint8)
    return lanes.reshape(-1).view(np.uint8)


def _byte_parts(matrix: QuantizedMatrix) -> tuple[list[np.ndarray], np.ndarray]:
    """Return scales and minima as bytes, uint8 [N, G] each, and the exponents of each row block, uint32 [B, 8]."""
    if matrix.minima is None:
        raise ValueError(f"format {matrix.spec}: minima belong to asymmetric formats and to no other")
    stored_bytes = [bytes_of(values) for values in (matrix.scales, -matrix.minima)]
    exponents = np.concatenate(
        [_pad_rows(stored.numpy()[:, np.newaxis]).reshape(-1, ROWS_PER_BLOCK) for _, stored in stored_bytes], axis=1
    )
    return [values.numpy() for values, _ in stored_bytes], np.ascontiguousarray(exponents).view("<u4")


def pack_16bit(weight: torch.Tensor, spec: QuantSpec) -> np.ndarray:
    """Return the bytes of a matrix that keeps its floats, uint8.

    weight: [N, K] in the float type of `spec`.
    Raises ValueError for another type or shape. Source: docs/format.md, Packing.
    """
    if spec.bitwidth != 16 or weight.dtype != _FLOAT_DTYPES[spec.float_type]:
        raise ValueError(f"format {spec} cannot store {weight.dtype} unchanged")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"expected a matrix, found shape {tuple(weight.shape)}")
    values = _pad_rows(weight.detach().contiguous().view(torch.int16).numpy())
    columns = values.shape[1]
    packed = np.empty((len(values) // ROWS_PER_BLOCK, columns, ROWS_PER_BLOCK), dtype="<i2")
    packed[...] = values.reshape(-1, ROWS_PER_BLOCK, columns).transpose(0, 2, 1)
    return packed.reshape(-1).view(np.uint8)


def unpack(data: np.ndarray, rows: int, columns: int, spec: QuantSpec) -> QuantizedMatrix:
    """Return the exact matrix that was packed into these bytes.

    data: uint8, `spec.packed_bytes(rows, columns)` of them.
    """
    if spec.is_pruned:
        return left_out(rows)
    groups, parts = spec.groups(columns), 1 if spec.symmetric or spec.is_mxfp4 else 2
    blocks = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK
    header = spec.group_header_bytes * ROWS_PER_BLOCK // _LANE_BYTES
    by_block, head = np.ascontiguousarray(data).reshape(blocks, -1), spec.block_header_bytes * ROWS_PER_BLOCK
    lanes = np.ascontiguousarray(by_block[:, head:]).view("<u4").reshape(blocks, groups, -1)
    halves = [
        np.ascontiguousarray(lanes[:, :, number * header // parts : (number + 1) * header // parts])
        .view("u1" if spec.is_mxfp4 or spec.byte_scales else "<f2")
        .transpose(0, 2, 1)
        .reshape(-1, groups)[:rows]
        .copy()
        for number in range(parts)
    ]
    codes = _unpack_codes(lanes[:, :, header:], columns, spec)[:rows]
    scales, *minima = (torch.from_numpy(half) for half in halves)
    if spec.byte_scales:
        steps = by_block[:, :head].reshape(blocks, 2, ROWS_PER_BLOCK).transpose(1, 0, 2).reshape(2, -1, 1)[:, :rows]
        ends = [torch.from_numpy(stored.astype(np.int32)) - EXPONENT_BIAS for stored in steps]
        scales, minima = torch.ldexp(scales.float(), ends[0]).half(), [-torch.ldexp(minima[0].float(), ends[1]).half()]
    return QuantizedMatrix(spec, torch.from_numpy(codes.copy()), scales, minima[0] if minima else None)


def _unpack_codes(lanes: np.ndarray, columns: int, spec: QuantSpec) -> np.ndarray:
    """Return the codes of all groups, uint8 [16 B, K].

    lanes: uint32 [B, G, lanes of a group].
    """
    blocks, groups, _ = lanes.shape
    if spec.is_ternary:
        tiles = np.ascontiguousarray(lanes).view(np.uint8)
        return unpack_ternary(tiles.reshape(blocks, columns // spec.tile_columns, -1))
    planes = lanes.reshape(blocks, groups, columns // groups // COLUMNS_PER_TILE, -1, ROWS_PER_BLOCK)
    planes = planes.transpose(0, 4, 1, 2, 3).reshape(blocks * ROWS_PER_BLOCK, columns // COLUMNS_PER_TILE, -1)
    return _lanes(planes, spec).view(np.uint8).reshape(blocks * ROWS_PER_BLOCK, columns)


def _lanes(planes: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Invert `_planes`: [16 B, tiles, planes] -> the eight lanes of each tile row, uint32 [16 B, tiles, 8]."""
    lanes = np.zeros((*planes.shape[:2], _LANES_PER_TILE), np.uint32)
    first = 0
    for bits in spec.plane_bits:
        per_plane = 8 // bits
        for lane in range(_LANES_PER_TILE):
            plane = planes[..., first + lane // per_plane]
            lanes[..., lane] |= (plane >> np.uint32(bits * (lane % per_plane)) & _low_bits(bits)) << np.uint32(first)
        first += bits
    return lanes


def _checked(matrix: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return codes uint8 [N, K], scales and minima float16 [N, G] (mxfp4 scales uint8). Raises ValueError."""
    spec = matrix.spec
    if spec.bitwidth == 16:
        raise ValueError("a 16-bit matrix has no codes")
    if matrix.codes.dtype != torch.uint8 or matrix.codes.ndim != 2 or 0 in matrix.codes.shape:
        raise ValueError(f"codes: expected a uint8 matrix, found {matrix.codes.dtype} {tuple(matrix.codes.shape)}")
    rows, columns = matrix.codes.shape
    if not spec.fits(columns):
        raise ValueError(f"format {spec} cannot hold rows of {columns} weights")
    if (matrix.minima is None) != (spec.symmetric or spec.is_mxfp4):
        raise ValueError(f"format {spec}: minima belong to asymmetric formats and to no other")
    codes = matrix.codes.contiguous().numpy()
    if int(codes.max()) > spec.largest_code:
        raise ValueError(f"codes: expected values below {spec.largest_code + 1}, found {int(codes.max())}")
    shape = (rows, spec.groups(columns))
    if spec.is_mxfp4:
        return codes, _exponents(matrix.scales, shape), None
    scales = _half("scales", matrix.scales, shape)
    minima = None if matrix.minima is None else _half("minima", matrix.minima, shape)
    return codes, scales, minima


def _half(name: str, values: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Return scales or minima as a checked array, float16 [N, G]. Raises ValueError."""
    if values.dtype != torch.float16 or tuple(values.shape) != shape:
        raise ValueError(f"{name}: expected float16 {shape}, found {values.dtype} {tuple(values.shape)}")
    array: np.ndarray = values.contiguous().numpy()
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: found a value that is not finite in float16")
    return array


def _exponents(values: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Return mxfp4 exponents as a checked array, uint8 [N, G]. Raises ValueError."""
    if values.dtype != torch.uint8 or tuple(values.shape) != shape:
        raise ValueError(f"scales: expected uint8 {shape}, found {values.dtype} {tuple(values.shape)}")
    array: np.ndarray = values.contiguous().numpy()
    if int(array.min()) < MXFP4_EXPONENTS[0] or int(array.max()) > MXFP4_EXPONENTS[1]:
        low, high = MXFP4_EXPONENTS
        raise ValueError(f"scales: expected exponents {low} to {high}, found {array.min()} to {array.max()}")
    return array


def _pad_rows(array: np.ndarray) -> np.ndarray:
    """Add zero rows up to a multiple of 16. Without missing rows nothing is copied."""
    missing = -len(array) % ROWS_PER_BLOCK
    return np.pad(array, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(array)


def _pack_codes(codes: np.ndarray, spec: QuantSpec, out: np.ndarray) -> None:
    """Write the tiles of all groups.

    A lane is four adjacent columns of one row. Planes combine lane by lane, and only lanes change places.
    codes: uint8 [16 B, K].
    out: uint32 [B, G, lanes of a group], a view that is written.
    """
    blocks, groups, _ = out.shape
    lanes = codes.view("<u4").reshape(len(codes), -1, _LANES_PER_TILE)
    planes = _planes(lanes, spec)
    shape = (blocks, ROWS_PER_BLOCK, groups, lanes.shape[1] // groups, planes.shape[-1])
    target = out.reshape(blocks, groups, shape[3], shape[4], ROWS_PER_BLOCK)
    target[...] = planes.reshape(shape).transpose(0, 2, 3, 4, 1)


def _planes(lanes: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Combine the eight lanes of each tile row into planes: [16 B, tiles, 8] -> uint32 [16 B, tiles, planes]."""
    if len(spec.plane_bits) == 1:
        return _planes_of_field(lanes, int(spec.bitwidth))
    fields, first = [], 0
    for bits in spec.plane_bits:
        fields.append(_planes_of_field(lanes >> np.uint32(first) & _low_bits(bits), bits))
        first += bits
    return np.concatenate(fields, axis=-1)


def _planes_of_field(lanes: np.ndarray, bits: int) -> np.ndarray:
    """Combine lanes whose bytes have `bits` bits, a divisor of 8: [16 B, tiles, 8] -> uint32 [16 B, tiles, bits]."""
    per_plane = 8 // bits
    planes = lanes[..., 0::per_plane]
    for place in range(1, per_plane):
        planes = planes | lanes[..., place::per_plane] << np.uint32(bits * place)
    return planes


def _low_bits(bits: int) -> np.uint32:
    """Return a mask of the low bits of each of the four bytes of a lane."""
    return np.uint32((2**bits - 1) * 0x01010101)


def pack_ternary(codes: np.ndarray) -> np.ndarray:
    """Pack codes 0 to 2 into tiles: uint8 [N, K] -> uint8 [B, T, 208].

    N is a multiple of 16, K of 64. Five codes form the base-3 number v, with the first code as the highest digit. Their
    byte is the least b with b / 256 >= v / 243. A product with 3 then gives each digit in turn.
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
