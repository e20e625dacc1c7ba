"""Products of bfloat16 experts with bfloat16 activations: bits of the specification, and the derived error bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.kernels import reference
from tests.kernels.packer import bits, pack_16_bit, random_matrix
from tests.kernels.products import EXPERTS, SENTINEL, UNIT, biases_of, expert_of, gate, inputs, matrix_of

SPEC = QuantSpec.parse("bf16")
TINY = 2.0**-126
LARGEST = 2.0**128 * (1 - 2.0**-9)  # from here on an activation becomes infinite


def need_bfloats() -> str:
    """Return the name of the products of the kernels in use, or skip the test."""
    if not kernels.bfloat_kernels():
        pytest.skip(f"the kernels {kernels.active()} have no products of bfloat16")
    return kernels.bfloat_kernels()


@pytest.fixture
def order() -> str:
    return need_bfloats()


def matrix_from(weights: np.ndarray) -> kernels.PackedMatrix:
    return kernels.PackedMatrix(pack_16_bit(weights, SPEC), *weights.shape, SPEC)


def products(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the products of the extension. Checks that memory around the output does not change."""
    memory = np.full(len(x) * len(weights) + 128, SENTINEL)
    out = memory[64:-64].reshape(len(x), len(weights))
    kernels.loaded().linear_of_bfloats(matrix_from(weights).native, x, out)
    assert (memory[:64] == SENTINEL).all() and (memory[-64:] == SENTINEL).all()
    return out


def truncated(weights: np.ndarray) -> np.ndarray:
    """Return the weights with the lower half of their bits cleared, which are bfloat16 values."""
    return (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def check_bound(weights: np.ndarray, x: np.ndarray, out: np.ndarray, order: str) -> None:
    """Check the bound of kernels_avx512bf16.cpp and kernels_amx_bf16.cpp, and its part for rounded activations."""
    wide, held = x.astype(np.float64), np.abs(weights.astype(np.float64))
    read = np.abs(reference.round_to_bfloat16(x).astype(np.float64))
    rounding = np.where(np.abs(wide) < TINY, np.abs(wide), np.abs(wide) / 257)
    tiles = -(-x.shape[1] // 32)
    adds = x.shape[1] + x.shape[1] % 2 if order == "avx512bf16" else tiles + 17
    results = adds if order == "avx512bf16" else 34 * tiles
    gamma = adds * UNIT / (1 - adds * UNIT)
    lost = (results + read.sum(axis=1)[:, None]) * TINY
    summing = gamma * (read @ held.T) + lost * (1 + gamma)
    exact, of_read = (
        values.astype(np.float64) @ weights.astype(np.float64).T for values in (x, reference.round_to_bfloat16(x))
    )
    assert (np.abs(out - of_read) <= summing).all()
    assert (np.abs(out - exact) <= summing + rounding @ held.T).all()


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(1, 40))


@st.composite
def cases(draw: st.DrawFn, wild: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [N, K] and activations [T, K]: of magnitudes that do not overflow, or of any bits."""
    rows, columns, tokens = draw(SHAPES)
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if wild:
        parts = [numbers.integers(0, 2**32, (count, columns), np.uint32).view(np.float32) for count in (rows, tokens)]
        return truncated(parts[0]), parts[1]
    low, high = draw(st.sampled_from([(-3, 3), (-140, -120), (-70, -60), (40, 58), (-149, 50)]))
    parts = []
    for count in (rows, tokens):
        exponents = numbers.integers(low, high, (count, columns))
        values = np.ldexp(numbers.uniform(1, 2, (count, columns)), exponents) * numbers.choice([-1, 0, 1, 1, -1])
        parts.append(values.astype(np.float32))
    return truncated(parts[0]), parts[1]


@gate
@given(case=cases(wild=False))
def test_products_stay_within_the_bound_and_have_the_specified_bits(case: tuple[np.ndarray, np.ndarray]) -> None:
    order, (weights, x) = need_bfloats(), case
    out = products(weights, x)
    check_bound(weights, x, out, order)
    assert np.array_equal(bits(out), bits(reference.bfloat_product(weights, x, order)))


@given(case=cases(wild=False), order=st.sampled_from(["avx512bf16", "amx-bf16"]))
def test_the_specification_stays_within_the_bound(case: tuple[np.ndarray, np.ndarray], order: str) -> None:
    weights, x = case
    check_bound(weights, x, reference.bfloat_product(weights, x, order), order)


@gate
@given(case=cases(wild=True))
def test_any_bits_give_the_specified_ones(case: tuple[np.ndarray, np.ndarray]) -> None:
    """Infinite and subnormal numbers and NaN are among the inputs, and sums overflow. All NaN are equal."""
    order, (weights, x) = need_bfloats(), case
    out, expected = products(weights, x), reference.bfloat_product(weights, x, order)
    assert ((bits(out) == bits(expected)) | (np.isnan(out) & np.isnan(expected))).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_rounding_of_activations(values: list[float]) -> None:
    x = np.array(values, np.float32)
    found, wide = reference.round_to_bfloat16(x), x.astype(np.float64)
    assert np.array_equal(np.isnan(found), np.isnan(x)) and not (found.view(np.uint32) & np.uint32(0xFFFF)).any()
    large, tiny = np.abs(wide) >= LARGEST, np.abs(wide) < TINY
    assert np.isinf(found[large]).all() and (found[tiny] == 0).all()
    rest = ~(large | tiny | np.isnan(x))
    assert (np.abs(found[rest] - wide[rest]) <= np.abs(wide[rest]) / 257).all()
    assert np.array_equal(np.signbit(found), np.signbit(x))


def test_the_tie_of_the_derived_error_is_reached() -> None:
    one = np.array([1 + 2.0**-8], np.float32)
    assert abs(float(reference.round_to_bfloat16(one)[0]) - float(one[0])) == float(one[0]) / 257


@gate
def test_tiny_results_become_zeros_after_rounding(order: str) -> None:
    """2^-126 - 2^-151 rounds up to 2^-126 and stays. 2^-126 - 2^-150 needs no rounding, and becomes zero."""
    if order != "avx512bf16":
        pytest.skip("of one chain of sums")
    for exponent, expected in ((-151, TINY), (-150, 0.0)):
        weights = np.array([[0, 2.0**-63, -(2.0 ** (exponent + 75)), 0]], np.float32)
        x = np.array([[0, 2.0**-63, 2.0**-75, 0]], np.float32)
        assert products(weights, x)[0, 0] == reference.bfloat_product(weights, x)[0, 0] == np.float32(expected)


@gate
def test_a_row_depends_on_no_other_row_and_on_no_thread(order: str) -> None:
    weights, x = random_matrix(50, 333, SPEC).weights, inputs(210, 333)
    alone = np.concatenate([products(weights, x[i : i + 1]) for i in range(len(x))])
    for first, last in ((0, 2), (0, 7), (3, 12), (1, 18), (0, 96), (5, 102), (0, 210)):
        for threads in (1, 3):
            kernels.set_threads(threads)
            assert np.array_equal(bits(products(weights, x[first:last])), bits(alone[first:last]))


@gate
@pytest.mark.parametrize("texts", [("bf16",) * 3, ("bf16", "q4g32", "fp16"), ("q8", "bf16", "bf16")], ids=str)
def test_experts_have_the_bits_of_their_products(order: str, texts: tuple[str, str, str]) -> None:
    """With relu there is no gate, and nothing between the products is rounded."""
    expert, parts = expert_of(70, 64, texts, activation="relu", reads_bfloats=True)
    x, places = inputs(21, 64), np.arange(21, dtype=np.int32)

    def multiplied(part: int, values: np.ndarray) -> np.ndarray:
        if parts[part].spec == SPEC:
            return reference.bfloat_product(parts[part].weights, values, order)
        out = np.empty((len(values), len(parts[part].weights)), np.float32)
        kernels.linear(matrix_of(parts[part]), values, out)
        return out

    expected = multiplied(2, np.maximum(multiplied(1, x), np.float32(0)))
    out = np.full((21, 2, 64), SENTINEL)
    kernels.expert_ffn(expert, x, places, np.ones(21, np.int32), out)
    assert np.array_equal(bits(out[:, 1]), bits(expected)) and (out[:, 0] == SENTINEL).all()


@gate
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_experts_are_close_to_those_in_numpy(order: str, activation: str) -> None:
    clamped = {"limit": 1.5, "biases": biases_of(70, 64)} if activation == "clamped_swiglu" else {}
    expert, _ = expert_of(70, 64, ("bf16",) * 3, activation=activation, reads_bfloats=True, **clamped)
    x, places = inputs(9, 64), np.arange(9, dtype=np.int32)
    out, expected = np.empty((9, 1, 64), np.float32), np.empty((9, 1, 64), np.float32)
    kernels.expert_ffn(expert, x, places, places * 0, out)
    reference.expert_ffn(expert, x, places, places * 0, expected)
    # A hidden value may be rounded the other way, by 2^-8 of itself. Seventy of them reach each result.
    assert np.abs(out - expected).max() <= 2.0**-8 * np.abs(expected).max()


@gate
def test_experts_of_a_token_are_those_experts_one_by_one(order: str) -> None:
    """Also if some of them read float32."""
    texts = [("bf16",) * 3, ("bf16", "q4g32", "bf16"), EXPERTS[2][2], ("bf16",) * 3]
    experts = [expert_of(160, 96, each, reads_bfloats=at != 3)[0] for at, each in enumerate(texts)]
    x, ranks = inputs(1, 96), np.array([2, 0, 3, 1], np.int32)
    together, alone = np.full((1, 4, 96), SENTINEL), np.full((1, 4, 96), SENTINEL)
    kernels.experts_of_token(experts, x, ranks, together)
    for expert, rank in zip(experts, ranks, strict=True):
        kernels.expert_ffn(expert, x, np.zeros(1, np.int32), np.array([rank], np.int32), alone)
    assert np.array_equal(bits(together), bits(alone)) and not (together == SENTINEL).any()
    exact = expert_of(160, 96, texts[0])[0]
    kernels.experts_of_token([exact], x, np.array([2], np.int32), alone)
    assert not np.array_equal(bits(together[0, 2]), bits(alone[0, 2]))


def test_kernels_without_these_products_refuse_the_experts(every: str) -> None:
    wide = every in ("amx", "avx512vnni")
    assert bool(kernels.bfloat_kernels()) <= wide
    if every not in ("numpy", "amx", "avx512vnni"):
        with pytest.raises(ValueError, match=f"the kernels `{every}` have no such products"):
            expert_of(64, 64, ("bf16",) * 3, reads_bfloats=True)
        matrix, x = matrix_of(random_matrix(16, 32, SPEC)), inputs(2, 32)
        with pytest.raises(ValueError, match="kernels that multiply it"):
            kernels.loaded().linear_of_bfloats(matrix.native, x, np.empty((2, 16), np.float32))


def test_wrong_arguments_are_refused(order: str) -> None:
    multiply, x, out = kernels.loaded().linear_of_bfloats, inputs(2, 32), np.empty((2, 16), np.float32)
    matrix, half = (matrix_of(random_matrix(16, 32, QuantSpec.parse(text))) for text in ("bf16", "fp16"))
    both = np.empty((2, 32), np.float32)
    for arguments in ((half, x, out), (matrix, x[:1], out), (matrix, x, out[:, :3].copy()), (matrix, x.T.copy(), out)):
        with pytest.raises(ValueError, match="expected"):
            multiply(arguments[0].native, *arguments[1:])
    with pytest.raises(ValueError, match="memory"):
        multiply(matrix_of(random_matrix(32, 32, SPEC)).native, both, both)
    with pytest.raises(ValueError, match="bfloat16"):
        reference.linear_of_bfloats(half, x, out)
    assert x.shape == (2, 32)
