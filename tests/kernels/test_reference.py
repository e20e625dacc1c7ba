"""The oracle against the table of docs/format.md."""

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
    bitwidth = draw(st.sampled_from([1, 2, 3, 4, 8]))
    symmetric = bitwidth > 1 and draw(st.booleans())
    tiles_per_group, groups, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.integers(0, 2**bitwidth, (rows, 32 * tiles_per_group * groups)).astype(np.uint8)
    scales = rng.uniform(-2, 2, (rows, groups)).astype(np.float16)
    minima = None if symmetric else rng.uniform(-2, 2, (rows, groups)).astype(np.float16)
    return codes, scales, minima, QuantSpec(bitwidth, 32 * tiles_per_group, symmetric)


@pytest.mark.gate("G8")
@settings(max_examples=80, deadline=None, derandomize=True)
@given(matrices())
def test_unpacking_inverts_packing(matrix: tuple[np.ndarray, np.ndarray, np.ndarray | None, QuantSpec]) -> None:
    codes, scales, minima, spec = matrix
    data = pack(codes, scales, minima, spec.bitwidth)
    assert data.size == spec.packed_bytes(*codes.shape)
    assert np.array_equal(unpack_codes(data, *codes.shape, spec), codes)
    wide = np.repeat(scales.astype(np.float64), spec.group_size, axis=1)
    if minima is None:
        exact = wide * (codes.astype(np.float64) - 2 ** (spec.bitwidth - 1))
    else:
        exact = wide * codes + np.repeat(minima.astype(np.float64), spec.group_size, axis=1)
    assert np.array_equal(unpack(data, *codes.shape, spec), exact.astype(np.float32))


@pytest.mark.gate("G8")
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_weights(spec: QuantSpec) -> None:
    packed = random_matrix(33, 384, spec)
    assert np.array_equal(bits(unpack(packed.data, 33, 384, spec)), bits(packed.weights))


@pytest.mark.gate("G8")
def test_every_half_and_bfloat(every: str) -> None:
    """All 65,536 patterns of both 16-bit types, as one row each, NaN by being NaN."""
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
