"""The numpy unpacking compared with the table of docs/format.md."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.manifests.quant import QuantSpec
from moec.runtime.kernels.packed_matrix import unpack, unpack_codes
from tests.kernels.packer import FORMATS, bits, pack, random_matrix


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, QuantSpec]:
    bitwidth = draw(st.sampled_from([1, 1.6, 2, 3, 4, 5, 6, 8]))
    symmetric = bitwidth == 1.6 or (bitwidth > 1 and draw(st.booleans()))
    tiles_per_group, groups, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = (64 if bitwidth == 1.6 else 32) * tiles_per_group
    codes = rng.integers(0, 3 if bitwidth == 1.6 else 2**bitwidth, (rows, width * groups)).astype(np.uint8)
    scales = rng.uniform(-2, 2, (rows, groups)).astype(np.float16)
    minima = None if symmetric else rng.uniform(-2, 2, (rows, groups)).astype(np.float16)
    return codes, scales, minima, QuantSpec(bitwidth, width, symmetric)


@pytest.mark.gate("G8")
@settings(derandomize=True)
@given(matrices())
def test_unpacking_inverts_packing(matrix: tuple[np.ndarray, np.ndarray, np.ndarray | None, QuantSpec]) -> None:
    codes, scales, minima, spec = matrix
    data = pack(codes, scales, minima, spec.bitwidth)
    assert data.size == spec.packed_bytes(*codes.shape)
    assert np.array_equal(unpack_codes(data, *codes.shape, spec), codes)
    wide = np.repeat(scales.astype(np.float64), spec.group_size, axis=1)
    if minima is None:
        exact = wide * (codes.astype(np.float64) - (1 if spec.bitwidth == 1.6 else 2 ** (spec.bitwidth - 1)))
    else:
        exact = wide * codes + np.repeat(minima.astype(np.float64), spec.group_size, axis=1)
    assert np.array_equal(unpack(data, *codes.shape, spec), exact.astype(np.float32))


@pytest.mark.gate("G8")
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_weights(spec: QuantSpec) -> None:
    packed = random_matrix(33, 384, spec)
    assert np.array_equal(bits(unpack(packed.data, 33, 384, spec)), bits(packed.weights))


@pytest.mark.gate("G8")
def test_every_byte_of_three_values(every: str) -> None:
    """Check all 256 bytes in all places, by the integer rule of docs/format.md. No writer makes some of them."""
    from moec.runtime import kernels

    spec, expected = QuantSpec.parse("q1.6s"), np.zeros((256, 16, 64), np.float32)
    tiles = np.zeros((256, 208), np.uint8)
    tiles[:] = np.arange(256)[:, None]
    for byte in range(256):
        left = byte
        for j in range(5):
            digit, left = divmod(3 * left, 256)
            for plane in range(3):
                expected[byte, :, 4 * (5 * plane + j) : 4 * (5 * plane + j) + 4] = digit - 1
        expected[byte, :, 60:] = [(byte >> shift & 3) - 1 for shift in (0, 2, 4, 6)]
    ones = np.tile(np.ones(16, np.float16).view(np.uint8), (256, 1))
    data = np.concatenate([ones, tiles], axis=1).reshape(-1)
    matrix, x = kernels.PackedMatrix(data, 4096, 64, spec), np.zeros((64, 64), np.float32)
    rows, products = np.empty((4096, 64), np.float32), np.empty((64, 4096), np.float32)
    kernels.dequantize_rows(matrix, np.arange(4096), rows)
    assert np.array_equal(rows, expected.reshape(4096, 64))
    np.fill_diagonal(x, 127)
    kernels.linear(matrix, x, products)
    assert np.array_equal(products.T, 127 * rows)
    for column in range(64):
        alone = np.empty((1, 4096), np.float32)
        kernels.linear(matrix, x[column : column + 1], alone)
        assert np.array_equal(alone[0], products[column])


@pytest.mark.gate("G8")
def test_five_codes_of_every_number_come_back() -> None:
    """Rounding up as in docs/format.md loses no digit of any of the 243 numbers."""
    for number in range(243):
        left, digits = -(-number * 256 // 243), 0
        assert left <= 255
        for _ in range(5):
            digit, left = divmod(3 * left, 256)
            digits = 3 * digits + digit
        assert digits == number


@pytest.mark.gate("G8")
def test_every_half_and_bfloat(every: str) -> None:
    """Check all 65,536 patterns of both 16-bit types, as one row each. NaN must stay NaN, with any bits."""
    from moec.runtime import kernels

    patterns = np.arange(1 << 16, dtype=np.uint16)
    data = np.zeros((1 << 16, 16), np.uint16)
    data[:, 0] = patterns
    for spec, expected in (
        (QuantSpec.parse("fp16"), patterns.view(np.float16).astype(np.float32)),
        (QuantSpec.parse("bf16"), (patterns.astype(np.uint32) << 16).view(np.float32)),
    ):
        matrix = kernels.PackedMatrix(data.view(np.uint8).reshape(-1), 1, 1 << 16, spec)
        out = np.empty((1, 1 << 16), np.float32)
        kernels.dequantize_rows(matrix, np.zeros(1, np.int64), out)
        is_nan = np.isnan(expected)
        assert np.isnan(out[0][is_nan]).all() and np.array_equal(bits(out[0][~is_nan]), bits(expected[~is_nan]))


def test_sixteen_bit_matrices_have_no_codes() -> None:
    with pytest.raises(ValueError, match="no codes"):
        unpack_codes(np.zeros(32, np.uint8), 1, 1, QuantSpec.parse("bf16"))
