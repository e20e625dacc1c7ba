"""Products with packed matrices: against float64, between instruction sets, batches and thread counts (G8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.packer import (
    FORMATS,
    LENGTHS,
    QUANTIZED,
    SIXTEEN_BIT,
    Packed,
    bits,
    pack,
    random_matrix,
    rounded,
)

gate = pytest.mark.gate("G8")
TOKENS = (1, 2, 3, 5, 7, 17, 64)
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
SENTINEL = np.float32(123456.0)


def matrix_of(packed: Packed) -> kernels.PackedMatrix:
    return kernels.PackedMatrix(packed.data, *packed.weights.shape, packed.spec)


def inputs(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([tokens, columns, seed]).standard_normal((tokens, columns)).astype(np.float32)


def linear(packed: Packed, x: np.ndarray) -> np.ndarray:
    """The product, with guards around the output that must stay as they are."""
    rows, guard = len(packed.weights), 64
    memory = np.full(2 * guard + len(x) * rows, SENTINEL)
    out = memory[guard : guard + len(x) * rows].reshape(len(x), rows)
    kernels.linear(matrix_of(packed), x, out)
    assert (memory[:guard] == SENTINEL).all() and (memory[guard + out.size :] == SENTINEL).all()
    return out


def roundings(columns: int, spec: QuantSpec) -> int:
    """Roundings on the way of one product into its sum: one per column, or one per tile and four in it."""
    if spec.bitwidth == 16 or kernels.active() == "numpy":
        return columns + 3
    return columns // 32 + 4


def relative_error(columns: int, spec: QuantSpec) -> float:
    """gamma = n u / (1 - n u)."""
    n = roundings(columns, spec)
    return n * UNIT / (1 - n * UNIT)


def read_by(spec: QuantSpec, x: np.ndarray) -> np.ndarray:
    """The activations that a matrix of this format reads, float64."""
    return x.astype(np.float64) if spec.bitwidth == 16 else rounded(x)[0]


def check_product(packed: Packed, x: np.ndarray, out: np.ndarray) -> None:
    """|error| <= gamma sum (|scale| code + |minimum|) |x|, against the activations that are read."""
    read = read_by(packed.spec, x)
    exact = read @ packed.weights.astype(np.float64).T
    bound = relative_error(x.shape[1], packed.spec) * (np.abs(read) @ packed.magnitudes.astype(np.float64).T)
    excess = np.abs(out - exact) - bound
    assert excess.max() <= 0, f"worst excess {excess.max()}"


@gate
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_rows_of_every_length(every: str, spec: QuantSpec) -> None:
    whole = random_matrix(1023, 128, spec)
    x = inputs(2, 128)
    for rows in LENGTHS:
        part = whole.rows(rows)
        for tokens in (1, 2):
            check_product(part, x[:tokens], linear(part, x[:tokens]))


@gate
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_columns_of_every_length(every: str, spec: QuantSpec) -> None:
    lengths = LENGTHS if spec.bitwidth == 16 else range(32, 1025, 32)
    for columns in lengths:
        if spec.fits(columns):
            packed = random_matrix(17, columns, spec)
            for tokens in (1, 3):
                x = inputs(tokens, columns)
                check_product(packed, x, linear(packed, x))


@gate
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_batches_of_every_size(every: str, spec: QuantSpec) -> None:
    packed = random_matrix(33, 384, spec)
    for tokens in TOKENS:
        x = inputs(tokens, 384)
        check_product(packed, x, linear(packed, x))


@gate
@pytest.mark.parametrize("spec", QUANTIZED, ids=str)
def test_rounding_the_activations_costs_half_a_step_at_most(every: str, spec: QuantSpec) -> None:
    packed, x = random_matrix(33, 384, spec), inputs(5, 384)
    x[1] *= np.geomspace(1e-6, 1e6, 384, dtype=np.float32)
    x[2, :32] = 0
    x[3] *= np.float32(1e-30)
    x[4] *= np.float32(1e-43)
    exact = x.astype(np.float64) @ packed.weights.astype(np.float64).T
    read, half_step = rounded(x)
    bound = half_step @ np.abs(packed.weights.astype(np.float64)).T * (1 + 1e-6)
    bound[4] += 1e-40  # as zero, not as multiples of a step
    bound += relative_error(384, spec) * (np.abs(read) @ packed.magnitudes.T)
    assert (np.abs(linear(packed, x) - exact) <= bound).all()


@gate
@pytest.mark.parametrize(
    "spec", [QuantSpec.parse(text) for text in ("q1.6g64s", "q2g32", "q3s", "q4g64", "q8")], ids=str
)
def test_extreme_codes_do_not_overflow(every: str, spec: QuantSpec) -> None:
    """All codes at their largest and all activations at 127 steps of one sign, or of alternating ones."""
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
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_values_that_are_not_finite_reach_the_output(every: str, spec: QuantSpec) -> None:
    packed = random_matrix(17, 128, spec)
    for value in (np.nan, np.inf, -np.inf):
        for tokens in (1, 3):
            x = inputs(tokens, 128)
            x[0, 40] = value
            out = linear(packed, x)
            assert not np.isfinite(out[0]).any()
            assert np.isfinite(out[1:]).all()


@gate
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_instruction_sets_agree_bit_for_bit(pair: tuple[str, str], spec: QuantSpec) -> None:
    for rows, columns, tokens in ((33, 384, 1), (49, 640, 3), (17, 128, 19), (16, 256, 100)):
        packed, x = random_matrix(rows, columns, spec), inputs(tokens, columns)
        found = []
        for name in pair:
            kernels.select(name)
            found.append(linear(packed, x))
        assert np.array_equal(bits(found[0]), bits(found[1]))


@gate
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_a_row_does_not_depend_on_its_batch(every: str, spec: QuantSpec) -> None:
    packed, x = random_matrix(33, 384, spec), inputs(101, 384)
    alone = np.concatenate([linear(packed, x[i : i + 1]) for i in range(len(x))])
    for first, last in ((0, 2), (5, 12), (0, 96), (3, 100), (0, 101)):
        assert np.array_equal(bits(linear(packed, x[first:last])), bits(alone[first:last]))


@gate
@pytest.mark.parametrize("spec", [QuantSpec.parse(text) for text in ("q1.6s", "q4g64", "q3", "q8s", "bf16")], ids=str)
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
@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_rows_are_dequantized_exactly(every: str, spec: QuantSpec) -> None:
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


def biases_of(width: int, hidden: int) -> list[np.ndarray]:
    draw = np.random.default_rng(8)
    return [draw.normal(0, 0.7, size).astype(np.float32) for size in (width, width, hidden)]


def expert_of(
    width: int, hidden: int, texts: tuple[str, str, str], **options: Any
) -> tuple[kernels.Expert, list[Packed]]:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = [
        random_matrix(*shape, QuantSpec.parse(text), seed)
        for seed, (shape, text) in enumerate(zip(shapes, texts, strict=True))
    ]
    gate, up, down = (matrix_of(part) for part in parts)
    has_gate = options.get("activation") != "relu"
    return kernels.Expert(gate if has_gate else None, up, down, **options), parts


EXPERTS = [
    (96, 64, ("q4g32", "q3g32s", "q8")),
    (37, 50, ("bf16", "fp16", "bf16")),
    (160, 96, ("q2s", "q2", "fp16")),
    (192, 128, ("q1.6g64s", "q1.6s", "q1.6g64s")),
    (64, 96, ("fp16", "q4g32", "q2")),
]


@gate
@pytest.mark.parametrize(("width", "hidden", "texts"), EXPERTS, ids=str)
def test_experts(every: str, width: int, hidden: int, texts: tuple[str, str, str]) -> None:
    expert, (gate_part, up_part, down_part) = expert_of(width, hidden, texts)
    x = inputs(9, hidden)
    tokens, ranks = np.array([8, 0, 3, 4, 7, 2, 1], np.int32), np.array([0, 1, 1, 0, 2, 2, 0], np.int32)
    out = np.full((9, 3, hidden), SENTINEL)
    kernels.expert_ffn(expert, x, tokens, ranks, out)
    projected, errors = [], []
    for part in (gate_part, up_part):
        read = read_by(part.spec, x[tokens])
        projected.append(read @ part.weights.T.astype(np.float64))
        errors.append(relative_error(hidden, part.spec) * (np.abs(read) @ part.magnitudes.T))
    (gates, ups), (gate_error, up_error) = projected, errors
    hidden_states = gates / (1 + np.exp(-gates)) * ups
    exact = hidden_states @ down_part.weights.T.astype(np.float64)
    # silu has slope at most 1.1; exp, sum and quotient add 4 roundings of 2 u
    silu = np.abs(gates / (1 + np.exp(-gates)))
    error = (
        (1.1 * gate_error + 8 * UNIT * silu) * (np.abs(ups) + up_error) + silu * up_error + UNIT * np.abs(hidden_states)
    )
    largest = np.abs(hidden_states) + error
    if down_part.spec.bitwidth < 16:  # and half a step, of a tile whose largest value may be off by its error
        error = error + rounded(largest.astype(np.float32))[1] * (1 + 1e-6)
    bound = error @ np.abs(down_part.weights.T.astype(np.float64))
    bound = (bound + relative_error(width, down_part.spec) * (largest @ down_part.magnitudes.T)) * (1 + 1e-4)
    assert (np.abs(out[tokens, ranks] - exact) <= bound).all()
    written = np.zeros((9, 3), bool)
    written[tokens, ranks] = True
    assert (out[~written] == SENTINEL).all()


@gate
@pytest.mark.parametrize("tokens", [1, 6, 13, 96, 97, 200])
def test_experts_agree(pair: tuple[str, str], tokens: int) -> None:
    """For whole and cut chunks of 96 tokens and steps of several, with an even and an odd number of row blocks."""
    for width, hidden, texts in ((96, 64, ("q4g32s", "q2g64s", "q8g32")), (80, 64, ("bf16", "q3g64", "fp16"))):
        x, places, found = inputs(tokens, hidden), np.arange(tokens, dtype=np.int32), []
        for name in pair:
            kernels.select(name)
            expert, _ = expert_of(width, hidden, texts)
            out = np.full((tokens, 1, hidden), SENTINEL)
            kernels.expert_ffn(expert, x, places, np.zeros(tokens, np.int32), out)
            found.append(bits(out))
        assert np.array_equal(*found) and not (out == SENTINEL).any()


@gate
@pytest.mark.parametrize(("width", "hidden", "texts"), EXPERTS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_biases_and_the_clamped_activation(
    every: str, activation: str, width: int, hidden: int, texts: tuple[str, str, str]
) -> None:
    """From the products of each matrix, which have tests of their own, by the definition in float64."""
    biases, limit = biases_of(width, hidden), 1.5
    expert, _ = expert_of(width, hidden, texts, activation=activation, limit=limit, biases=biases)
    x, tokens = inputs(5, hidden), np.arange(5, dtype=np.int32)
    products = []
    for matrix in (expert.gate, expert.up):
        product = np.full((5, width), SENTINEL)
        kernels.linear(matrix, x, product)
        products.append(product.astype(np.float64))
    gate, up = products[0] + biases[0], products[1] + biases[1]
    if activation == "silu":
        middle = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        assert (gate == limit).any() and (np.abs(up) == limit).any()
        middle = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    expected = np.full((5, hidden), SENTINEL)
    kernels.linear(expert.down, middle.astype(np.float32), expected)
    out, alone = np.full((5, 2, hidden), SENTINEL), np.full((1, 2, hidden), SENTINEL)
    kernels.expert_ffn(expert, x, tokens, np.ones(5, np.int32), out)
    # A rounding of the middle may fall the other way, by one of the 254 steps of its tile.
    slack = 1e-4 if expert.down.spec.bitwidth == 16 else 2e-2
    assert np.abs(out[:, 1] - (expected + biases[2])).max() <= slack * np.abs(expected).max()
    assert (out[:, 0] == SENTINEL).all()
    kernels.experts_of_token([expert], x[3:4], np.array([1], np.int32), alone)
    assert np.array_equal(bits(alone[0, 1]), bits(out[3, 1]))


def test_biases_are_checked(every: str) -> None:
    right = biases_of(96, 64)
    for options in (
        {"biases": right[:2]}, {"biases": [right[0], right[1], right[1]]}, {"activation": "gelu"},
        {"biases": [bias.astype(np.float64) for bias in right]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"bias|activation"):
            expert_of(*EXPERTS[0], **options)


@gate
@pytest.mark.parametrize(("width", "hidden", "texts"), EXPERTS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu", "relu"])
def test_experts_agree_bit_for_bit(
    pair: tuple[str, str], activation: str, width: int, hidden: int, texts: tuple[str, str, str]
) -> None:
    clamped = {"limit": 1.5, "biases": biases_of(width, hidden)} if activation == "clamped_swiglu" else {}
    expert, _ = expert_of(width, hidden, texts, activation=activation, **clamped)
    x = inputs(210, hidden)
    found = []
    for name in pair:
        kernels.select(name)
        for threads in (1, 3):
            kernels.set_threads(threads)
            for size in (1, 7, 210):
                out = np.zeros((210, 2, hidden), np.float32)
                for first in range(0, 210, size):
                    tokens = np.arange(first, first + size, dtype=np.int32)[::-1].copy()
                    kernels.expert_ffn(expert, x, tokens, np.ones(size, np.int32), out)
                found.append(out)
    assert all(np.array_equal(bits(found[0]), bits(other)) for other in found[1:])


@gate
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("width", "hidden"), [(96, 64), (160, 96), (1024, 512)])
def test_experts_of_a_token_are_those_experts_one_by_one(every: str, threads: int, width: int, hidden: int) -> None:
    kernels.set_threads(threads)
    texts = (("q4g32", "q3g32s", "q8"), ("bf16", "fp16", "bf16"), ("q2s", "q2", "fp16"), ("fp16", "q4g32", "q2"))
    experts = [expert_of(width, hidden, text)[0] for text in texts]
    x, ranks = inputs(1, hidden), np.array([4, 0, 2, 1], np.int32)
    for count in range(len(experts) + 1):
        together, alone = np.full((1, 5, hidden), SENTINEL), np.full((1, 5, hidden), SENTINEL)
        kernels.experts_of_token(experts[:count], x, ranks[:count], together)
        for expert, rank in zip(experts[:count], ranks, strict=False):
            kernels.expert_ffn(expert, x, np.zeros(1, np.int32), np.array([rank], np.int32), alone)
        assert np.array_equal(bits(together), bits(alone))


def test_experts_of_a_token_are_checked(every: str) -> None:
    one, other = expert_of(*EXPERTS[0])[0], expert_of(*EXPERTS[1])[0]
    x, out, rank = inputs(1, 64), np.zeros((1, 2, 64), np.float32), np.zeros(1, np.int32)
    for experts, some_x, ranks, some_out, message in (
        ([one, other], x, np.array([0, 1], np.int32), out, "one size for all"),
        ([one], inputs(2, 64), rank, out, "64"),
        ([one], x, np.zeros(2, np.int32), out, "2"),
        ([one], x, np.array([2], np.int32), out, "below 2"),
        ([one], x, rank, np.zeros((1, 2, 63), np.float32), "63"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.experts_of_token(experts, some_x, ranks, some_out)


def test_silu_of_huge_values_is_no_nan(every: str) -> None:
    one = np.ones((1, 1), np.float32)
    matrix = matrix_of(Packed(np.array([0x80, 0x3F] + [0] * 30, np.uint8), one, QuantSpec.parse("bf16"), one))
    expert = kernels.Expert(matrix, matrix, matrix)
    for value, expected in ((-1e30, 0.0), (-1e15, 0.0), (-100.0, 0.0), (0.0, 0.0), (1e15, 1e30)):
        out = np.full((1, 1, 1), np.nan, np.float32)
        kernels.expert_ffn(expert, one * np.float32(value), np.zeros(1, np.int32), np.zeros(1, np.int32), out)
        assert np.isclose(out[0, 0, 0], expected, rtol=1e-6, atol=1e-38)


def test_an_empty_batch_is_fine(every: str) -> None:
    packed = random_matrix(33, 384, QUANTIZED[0])
    assert linear(packed, np.empty((0, 384), np.float32)).shape == (0, 33)
    expert, _ = expert_of(*EXPERTS[0])
    nothing = np.empty(0, np.int32)
    kernels.expert_ffn(expert, np.empty((0, 64), np.float32), nothing, nothing, np.empty((0, 2, 64), np.float32))
