"""Expert shares of several routers in one call, and the largest values with their indices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.kernels import lookahead
from tests.kernels.packer import bits, random_matrix
from tests.kernels.products import gate, inputs, linear, matrix_of
from tests.kernels.test_hostile import zeros

EPS = 1e-5


def one_by_one(
    parts: list[kernels.PackedMatrix], norms: list[np.ndarray], x: np.ndarray, biases: list[np.ndarray | None]
) -> np.ndarray:
    """Compute norm, product, bias and softmax for one router after the other."""
    rows = []
    for matrix, norm, bias in zip(parts, norms, biases, strict=True):
        normed, logits = np.empty_like(x), np.empty((1, matrix.rows), np.float32)
        kernels.rms_norm(x, norm, EPS, normed)
        kernels.linear(matrix, normed, logits)
        logits += 0 if bias is None else bias
        shares = np.exp((logits[0] - logits[0].max()).astype(np.float64))
        rows.append(shares / shares.sum())
    return np.array(rows)


@gate
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("formats", [("bf16",), ("bf16", "fp16", "q8"), ("q4g32s", "bf16", "q2g64")], ids=len)
@pytest.mark.parametrize("experts", [1, 16, 70])
def test_shares_are_those_of_norm_product_and_softmax(
    every: str, threads: int, formats: tuple[str, ...], experts: int
) -> None:
    kernels.set_threads(threads)
    parts = [matrix_of(random_matrix(experts, 256, QuantSpec.parse(text))) for text in formats]
    norms = [1 + inputs(1, 256, seed)[0] / 4 for seed in range(len(parts))]
    x, out = inputs(1, 256), np.full((len(parts), experts), np.float32(np.nan))
    biases: list[np.ndarray | None] = [None] * len(parts)
    kernels.router_shares(parts, norms, EPS, x, out)
    assert out == pytest.approx(one_by_one(parts, norms, x, biases), rel=1e-5, abs=1e-9)
    assert out.sum(axis=1) == pytest.approx(np.ones(len(parts)), rel=1e-5)
    biases[-1] = inputs(1, experts, 5)[0]
    kernels.router_shares(parts, norms, EPS, x, out, biases)
    assert out == pytest.approx(one_by_one(parts, norms, x, biases), rel=1e-5, abs=1e-9)


@gate
def test_every_instruction_set_gives_the_same_bits(pair: tuple[str, str]) -> None:
    parts = [matrix_of(random_matrix(48, 256, QuantSpec.parse(text))) for text in ("bf16", "q4g32")]
    norms, x, found = [inputs(1, 256, 7)[0], inputs(1, 256, 8)[0]], inputs(1, 256), []
    for name in pair:
        kernels.select(name)
        found.append(np.full((2, 48), np.float32(np.nan)))
        kernels.router_shares(parts, norms, EPS, x, found[-1], [None, inputs(1, 48, 9)[0]])
    assert np.array_equal(bits(found[0]), bits(found[1]))


def test_what_does_not_fit_is_refused(every: str) -> None:
    packed, wide = random_matrix(4, 64, QuantSpec.parse("q4g32")), random_matrix(4, 128, QuantSpec.parse("q4g32"))
    taller = matrix_of(random_matrix(5, 64, QuantSpec.parse("q4g32")))
    matrix, other, norm = matrix_of(packed), matrix_of(wide), zeros(1, 64)[0]
    for matrices, norms, x, out in (
        ([], [], zeros(1, 64), zeros(0, 4)),
        ([matrix] * 9, [norm] * 9, zeros(1, 64), zeros(9, 4)),
        ([matrix] * 2, [norm], zeros(1, 64), zeros(2, 4)),
        ([matrix], [norm], zeros(2, 64), zeros(1, 4)),
        ([matrix], [norm], zeros(1, 128), zeros(1, 4)),
        ([matrix, other], [norm] * 2, zeros(1, 64), zeros(2, 4)),
        ([matrix, taller], [norm] * 2, zeros(1, 64), zeros(2, 4)),
        ([matrix], [zeros(1, 32)[0]], zeros(1, 64), zeros(1, 4)),
        ([matrix] * 2, [norm] * 2, zeros(1, 64), zeros(1, 4)),
        ([matrix], [norm], zeros(1, 64).astype(np.float64), zeros(1, 4)),
    ):
        with pytest.raises(ValueError):
            kernels.router_shares(matrices, norms, EPS, x, out)
    for biases in ([zeros(1, 4)[0]] * 2, [zeros(1, 5)[0]], [zeros(1, 4)[0].astype(np.float64)]):
        with pytest.raises(ValueError, match="biases"):
            kernels.router_shares([matrix], [norm], EPS, zeros(1, 64), zeros(1, 4), biases)
    if every != "numpy":
        x = zeros(1, 64)
        with pytest.raises(ValueError, match="separate"):
            kernels.router_shares([matrix], [norm], EPS, x, x.reshape(-1)[:4].reshape(1, 4))


def test_shares_are_finite_where_one_expert_has_nearly_all(every: str) -> None:
    """No share is negative or NaN if exponentials underflow."""
    part = random_matrix(16, 64, QuantSpec.parse("bf16"))
    x, out = np.full((1, 64), np.float32(1)), np.empty((1, 16), np.float32)
    scaled = np.full(64, np.float32(1e4))
    kernels.router_shares([matrix_of(part)], [scaled], EPS, x, out)
    assert np.isfinite(out).all() and (out >= 0).all() and out.sum() == pytest.approx(1)
    assert out[0].argmax() == linear(part, x)[0].argmax()


compiled = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")
values = st.one_of(st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")]), st.floats(width=32))


@compiled
@given(st.lists(values, max_size=40), st.integers(0, 50))
def test_the_largest_are_those_of_numpy(found: list[float], count: int) -> None:
    array = np.array(found, np.float32)
    order, largest = kernels.largest(array, count)
    expected, their = lookahead.largest(array, count)
    assert order == expected and np.array_equal(largest, their, equal_nan=True)
    assert kernels.largest(array.astype(np.float64), count)[0] == expected


@compiled
def test_only_a_list_is_ranked() -> None:
    with pytest.raises(ValueError, match="1 dimensions"):
        kernels.largest(np.zeros((2, 2), np.float32), 1)
