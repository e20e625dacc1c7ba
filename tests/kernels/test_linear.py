"""Packed matrices: unpacked as docs/format.md says, products against float64, and between instruction sets (G8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.kernels.packed_matrix import unpack, unpack_codes
from tests.kernels.checked_programs import IS_FULL
from tests.kernels.packer import FORMATS, LENGTHS, QUANTIZED, SIXTEEN_BIT, Packed, bits, pack, random_matrix, rounded
from tests.kernels.products import SENTINEL, by_bits, check_product, gate, inputs, linear, matrix_of, relative_error


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


TOKENS = (1, 2, 3, 5, 7, 17, 64)


@gate
@by_bits(FORMATS)
def test_rows_of_every_length(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        whole = random_matrix(1023, 128, spec)
        x = inputs(2, 128)
        for rows in LENGTHS:
            part = whole.rows(rows)
            for tokens in (1, 2):
                check_product(part, x[:tokens], linear(part, x[:tokens]))


@gate
@by_bits(FORMATS)
def test_columns_of_every_length(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        lengths = LENGTHS if spec.bitwidth == 16 else range(32, 1025, 32 if IS_FULL else 96)
        for columns in lengths:
            if spec.fits(columns):
                packed = random_matrix(17, columns, spec)
                for tokens in (1, 3):
                    x = inputs(tokens, columns)
                    check_product(packed, x, linear(packed, x))


@gate
@by_bits(FORMATS)
def test_batches_of_every_size(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        packed = random_matrix(33, 384, spec)
        for tokens in TOKENS:
            x = inputs(tokens, 384)
            check_product(packed, x, linear(packed, x))


@gate
@by_bits(QUANTIZED)
def test_rounding_the_activations_costs_half_a_step_at_most(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        packed, x = random_matrix(33, 384, spec), inputs(5, 384)
        x[1] *= np.geomspace(1e-6, 1e6, 384, dtype=np.float32)
        x[2, :32] = 0
        x[3] *= np.float32(1e-30)
        x[4] *= np.float32(1e-43)
        exact = x.astype(np.float64) @ packed.weights.astype(np.float64).T
        read, half_step = rounded(x)
        bound = half_step @ np.abs(packed.weights.astype(np.float64)).T * (1 + 1e-6)
        bound[4] += 1e-40  # read as zero, not as multiples of a step
        bound += relative_error(384, spec) * (np.abs(read) @ packed.magnitudes.T)
        assert (np.abs(linear(packed, x) - exact) <= bound).all()


@gate
@pytest.mark.parametrize(
    "spec", [QuantSpec.parse(text) for text in ("q1.6g64s", "q2g32", "q3s", "q4g64", "q5g64", "q6s", "q8")], ids=str
)
def test_extreme_codes_do_not_overflow(every: str, spec: QuantSpec) -> None:
    """Codes are the smallest or the largest; activations are 127 steps, of one sign or of alternating signs."""
    rows, columns = 17, 384
    top = 2 if spec.bitwidth == 1.6 else 2**spec.bitwidth - 1
    centre = 1.0 if spec.bitwidth == 1.6 else 2.0 ** (spec.bitwidth - 1)
    for signs in (np.ones(columns), -np.ones(columns), np.resize([1.0, -1.0], columns)):
        for code in (0, top):
            codes = np.full((rows, columns), code, np.uint8)
            ones = np.ones((rows, spec.groups(columns)), np.float16)
            minima = None if spec.symmetric else -ones
            offset = -centre if spec.symmetric else -1.0
            weights = np.full((rows, columns), code + offset, np.float32)
            packed = Packed(pack(codes, ones, minima, spec.bitwidth), weights, spec, np.abs(weights) + 2 * abs(offset))
            for tokens in (1, 7):
                x = np.tile(signs.astype(np.float32) * np.float32(12.7), (tokens, 1))
                check_product(packed, x, linear(packed, x))


@gate
@by_bits(FORMATS)
def test_values_that_are_not_finite_reach_the_output(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        packed = random_matrix(17, 128, spec)
        for value in (np.nan, np.inf, -np.inf):
            for tokens in (1, 3):
                x = inputs(tokens, 128)
                x[0, 40] = value
                out = linear(packed, x)
                assert not np.isfinite(out[0]).any()
                assert np.isfinite(out[1:]).all()


@gate
@by_bits(FORMATS)
def test_instruction_sets_agree_bit_for_bit(pair: tuple[str, str], specs: list[QuantSpec]) -> None:
    for spec in specs:
        for rows, columns, tokens in ((33, 384, 1), (49, 640, 3), (17, 128, 19), (16, 256, 100)):
            packed, x = random_matrix(rows, columns, spec), inputs(tokens, columns)
            found = []
            for name in pair:
                kernels.select(name)
                found.append(linear(packed, x))
            assert np.array_equal(bits(found[0]), bits(found[1]))


@gate
@by_bits(FORMATS)
def test_a_row_does_not_depend_on_its_batch(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        packed, x = random_matrix(33, 384, spec), inputs(101, 384)
        alone = np.concatenate([linear(packed, x[i : i + 1]) for i in range(len(x))])
        # Groups of every size for eight and sixteen lanes, and some sizes for AMX.
        for first, last in ((0, 2), (0, 3), (0, 4), (5, 12), (1, 13), (0, 14), (2, 19), (0, 96), (3, 100), (0, 101)):
            assert np.array_equal(bits(linear(packed, x[first:last])), bits(alone[first:last]))


@gate
@pytest.mark.parametrize(
    "spec", [QuantSpec.parse(text) for text in ("q1.6s", "q4g64", "q3", "q5s", "q6g32", "q8s", "bf16")], ids=str
)
@pytest.mark.parametrize("shape", [(1023, 1024, 1), (257, 512, 33)], ids=str)
def test_threads_change_nothing(native: str, spec: QuantSpec, shape: tuple[int, int, int]) -> None:
    rows, columns, tokens = shape
    packed, x = random_matrix(rows, columns, spec), inputs(tokens, columns)
    expected = linear(packed, x)
    for count in (2, 3, 4):
        kernels.set_threads(count)
        assert kernels.threads() == count
        assert np.array_equal(bits(linear(packed, x)), bits(expected))


@gate
def test_more_threads_than_have_work_of_their_own(native: str) -> None:
    packed, x = random_matrix(1100, 1024, QuantSpec.parse("q4g32s")), inputs(33, 1024)
    expected = linear(packed, x)
    kernels.set_threads(70)  # more threads than the 64 ranges of the pool
    for _ in range(3):
        assert np.array_equal(bits(linear(packed, x)), bits(expected))


@gate
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_products_of_one_input_are_those_products_one_by_one(every: str, threads: int, tokens: int) -> None:
    kernels.set_threads(threads)
    parts = [
        random_matrix(rows, 256, QuantSpec.parse(text))
        for rows, text in ((33, "q4g32s"), (16, "bf16"), (1, "q2g64"), (70, "q8"))
    ]
    x = inputs(tokens, 256)
    outs = [np.full((tokens, len(part.weights)), SENTINEL) for part in parts]
    kernels.linears([matrix_of(part) for part in parts], x, outs)
    for part, out in zip(parts, outs, strict=True):
        assert np.array_equal(bits(out), bits(linear(part, x)))


@gate
@by_bits(FORMATS)
def test_rows_are_dequantized_exactly(every: str, specs: list[QuantSpec]) -> None:
    for spec in specs:
        packed = random_matrix(33, 384, spec)
        wanted = np.array([32, 0, 15, 16, 7, 7], np.int64)
        out = np.full((len(wanted), 384), SENTINEL)
        kernels.dequantize_rows(matrix_of(packed), wanted, out)
        assert np.array_equal(bits(out), bits(packed.weights[wanted]))


@gate
@pytest.mark.parametrize("spec", [QUANTIZED[0], QUANTIZED[9], *SIXTEEN_BIT], ids=str)
def test_memory_needs_no_alignment(every: str, spec: QuantSpec) -> None:
    packed, x = random_matrix(33, 384, spec), inputs(3, 384)
    shifted = np.empty(packed.data.size + 1, np.uint8)[1:]
    shifted[:] = packed.data
    shifted.flags.writeable = False
    out = linear(Packed(shifted, packed.weights, spec, packed.magnitudes), x)
    assert np.array_equal(bits(out), bits(linear(packed, x)))
