"""A second packer, written only from the table of docs/format.md, and random matrices for the tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moec.manifests.quant import QuantSpec

LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 511, 513, 1023)
TERNARY = tuple(QuantSpec.parse(text) for text in ("q1.6s", "q1.6g64s", "q1.6g128s"))
QUANTIZED_INTEGERS = tuple(
    QuantSpec(bitwidth, group_size, symmetric)
    for bitwidth in (1, 2, 3, 4, 5, 6, 8)
    for symmetric in (False, True)
    for group_size in (0, 32, 64, 128)
    if bitwidth > 1 or not symmetric
)
MXFP4 = QuantSpec.parse("mxfp4")
BYTE_SCALES = tuple(QuantSpec(bits, size, byte_scales=True) for bits in (1, 2, 3, 4, 5) for size in (32, 64, 128))
QUANTIZED = (*QUANTIZED_INTEGERS, MXFP4, *TERNARY, *BYTE_SCALES)
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIXTEEN_BIT = (QuantSpec.parse("bf16"), QuantSpec.parse("fp16"))
FORMATS = QUANTIZED + SIXTEEN_BIT


@dataclass(frozen=True)
class Packed:
    """A packed matrix and its weights.

    data: uint8[packed_bytes].
    weights: float32[rows, columns], the values of `data`.
    magnitudes: [rows, columns], |scale| code + |minimum|. Rounding errors of a product are relative to them.
    """

    data: np.ndarray
    weights: np.ndarray
    spec: QuantSpec
    magnitudes: np.ndarray

    def rows(self, count: int) -> Packed:
        """Return the first rows as a matrix: a prefix of the row blocks. Its padding rows are not zero."""
        data = self.data[: self.spec.packed_bytes(count, self.weights.shape[1])]
        return Packed(data, self.weights[:count], self.spec, self.magnitudes[:count])


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round float32 rows [T, K] as quantized matrices read them.

    Returns the rounded values (8-bit multiples of a step) and half of each column's step, both float64 [T, K].
    The arithmetic is float32, with the operations in the order of the specification.
    """
    tiles = x.reshape(len(x), x.shape[1] // 32, 32)
    largest = np.abs(tiles).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 2.0**-110)
    codes, steps = np.rint(tiles * inverse), largest / np.float32(127)
    assert codes.dtype == steps.dtype == np.float32 and np.abs(codes).max(initial=0) <= 127
    values = codes.astype(np.float64) * steps
    return values.reshape(x.shape), np.broadcast_to(steps / 2.0, tiles.shape).reshape(x.shape)


def pack_tile(codes: np.ndarray, bitwidth: int) -> np.ndarray:
    """Pack codes uint8[n, 16, 32] into tiles uint8[n, 64 * bitwidth], column by column as in the table."""
    tiles = np.zeros((len(codes), 64 * bitwidth), np.uint8)
    rows = 4 * np.arange(16)
    for k in range(32):
        q, c = k // 4, k % 4
        cells, code = rows + c, codes[:, :, k]
        if bitwidth == 8:
            tiles[:, 64 * q + cells] |= code
        elif bitwidth >= 4:
            tiles[:, 64 * (q // 2) + cells] |= (code & 15) << (4 * (q % 2))
        elif bitwidth == 1:
            tiles[:, cells] |= code << q
        else:
            tiles[:, 64 * (q // 4) + cells] |= (code & 3) << (2 * (q % 4))
        if bitwidth == 3:
            tiles[:, 128 + cells] |= (code >> 2) << q
        elif bitwidth == 5:
            tiles[:, 256 + cells] |= (code >> 4) << q
        elif bitwidth == 6:
            tiles[:, 256 + 64 * (q // 4) + cells] |= (code >> 4) << (2 * (q % 4))
    return tiles


def pack_ternary_tile(codes: np.ndarray) -> np.ndarray:
    """Pack three-valued codes uint8[n, 16, 64] into tiles uint8[n, 208], cell by cell as in the text."""
    tiles = np.zeros((len(codes), 208), np.uint8)
    for r in range(16):
        for c in range(4):
            for p in range(3):
                number = np.zeros(len(codes), int)
                for j in range(5):
                    number = 3 * number + codes[:, r, 4 * (5 * p + j) + c]
                tiles[:, 64 * p + 4 * r + c] = np.ceil(number * 256 / 243).astype(np.uint8)
            tiles[:, 192 + r] |= codes[:, r, 60 + c] << (2 * c)
    return tiles


def pad_rows(values: np.ndarray) -> np.ndarray:
    """Pad rows with zeros to whole row blocks: [N, ...] -> [blocks, 16, ...]."""
    padded = np.zeros((-(-len(values) // 16) * 16, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded.reshape(-1, 16, *values.shape[1:])


def pack(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray | None, bitwidth: float) -> np.ndarray:
    """Pack a quantized matrix into uint8[packed_bytes].

    codes: uint8[N, K].
    scales, minima: float16[N, G]; scales of mxfp4 are uint8.
    """
    groups = scales.shape[1]
    blocks = pad_rows(codes)
    width = 64 if bitwidth == 1.6 else 32
    tiles = blocks.reshape(len(blocks), 16, -1, width).transpose(0, 2, 1, 3).reshape(-1, 16, width)
    parts = [pad_rows(scales).transpose(0, 2, 1).copy().view(np.uint8)]
    if minima is not None:
        parts.append(pad_rows(minima).transpose(0, 2, 1).copy().view(np.uint8))
    packed = pack_ternary_tile(tiles) if bitwidth == 1.6 else pack_tile(tiles, int(bitwidth))
    parts.append(packed.reshape(len(blocks), groups, -1))
    return np.concatenate(parts, axis=2).reshape(-1)


def pack_byte_scales(
    codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, exponents: np.ndarray, bitwidth: int
) -> np.ndarray:
    """Pack a matrix with scales in bytes into uint8[packed_bytes].

    codes: uint8[N, K].
    scales, minima: uint8[N, G].
    exponents: uint8[N, 2].
    """
    groups = pack(codes, scales, minima, bitwidth).reshape(-(-len(codes) // 16), -1)
    head = pad_rows(exponents).transpose(0, 2, 1).reshape(len(groups), -1)
    return np.concatenate((head, groups), axis=1).reshape(-1)


def pack_16_bit(weights: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Pack a 16-bit matrix into uint8[packed_bytes]. weights: float32[N, K], exact in the 16-bit type."""
    if spec.float_type == "bfloat16":
        values = (weights.view(np.uint32) >> 16).astype(np.uint16)
    else:
        values = weights.astype(np.float16).view(np.uint16)
    return pad_rows(values).transpose(0, 2, 1).copy().view(np.uint8).reshape(-1)


@lru_cache(maxsize=512)
def random_matrix(rows: int, columns: int, spec: QuantSpec, seed: int = 0) -> Packed:
    """Return a matrix of random weights around zero. Equal arguments give equal matrices."""
    rng = np.random.default_rng([rows, columns, int(spec.bitwidth), seed])
    if spec.bitwidth == 16:
        weights = rng.standard_normal((rows, columns)).astype(np.float32)
        if spec.float_type == "bfloat16":
            weights = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
        else:
            weights = weights.astype(np.float16).astype(np.float32)
        return Packed(pack_16_bit(weights, spec), weights, spec, np.abs(weights))
    codes = rng.integers(0, spec.largest_code + 1, (rows, columns)).astype(np.uint8)
    groups = spec.groups(columns)
    if spec.is_mxfp4:
        exponents = rng.integers(118, 126, (rows, groups)).astype(np.uint8)
        steps = np.ldexp(1.0, exponents.astype(int) - 127)[:, :, None]
        table = np.array([*FLOAT4, *(-value for value in FLOAT4)]) + 0.0  # the format loses the sign of a zero
        floats = table[codes].reshape(rows, groups, 32)
        weights = (floats * steps).reshape(rows, columns).astype(np.float32)
        # Kernels multiply levels (twice the float plus 12) and subtract the 12 again.
        magnitudes = ((floats + 12) * steps).reshape(rows, columns)
        return Packed(pack(codes, exponents, None, 4), weights, spec, magnitudes)
    if spec.byte_scales:
        exponents = rng.integers(112, 120, (rows, 2)).astype(np.uint8)
        factors = rng.integers(0, 256, (2, rows, groups)).astype(np.uint8)
        steps = np.ldexp(1.0, exponents.astype(int) - 127)
        products = (factors[0] * steps[:, :1])[:, :, None] * codes.reshape(rows, groups, -1)
        offsets = -(factors[1] * steps[:, 1:])[:, :, None]
        weights = (products + offsets).reshape(rows, columns).astype(np.float32)
        magnitudes = (products - offsets).reshape(rows, columns)
        return Packed(pack_byte_scales(codes, *factors, exponents, int(spec.bitwidth)), weights, spec, magnitudes)
    scales = rng.uniform(0.001, 0.1, (rows, groups)).astype(np.float16)
    minima = None if spec.symmetric else rng.uniform(-0.2, 0.1, (rows, groups)).astype(np.float16)
    wide = scales.astype(np.float64)
    offsets = (
        wide * -(1.0 if spec in TERNARY else 2.0 ** (spec.bitwidth - 1))
        if minima is None
        else minima.astype(np.float64)
    )
    products = wide[:, :, None] * codes.reshape(rows, groups, -1)
    weights = (products + offsets[:, :, None]).reshape(rows, columns).astype(np.float32)
    magnitudes = (products + np.abs(offsets)[:, :, None]).reshape(rows, columns)
    return Packed(pack(codes, scales, minima, spec.bitwidth), weights, spec, magnitudes)


def bits(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of float32 values, so that comparisons see the sign of zero and NaN."""
    return values.view(np.uint32)
