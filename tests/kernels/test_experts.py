"""Whole experts: compared with float64, and between instruction sets, batches and thread counts (G8)."""

from __future__ import annotations

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.packer import QUANTIZED, Packed, bits, random_matrix, rounded
from tests.kernels.products import (
    EXPERTS,
    SENTINEL,
    UNIT,
    biases_of,
    expert_of,
    gate,
    inputs,
    linear,
    matrix_of,
    read_by,
    relative_error,
)


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
    # The slope of silu is at most 1.1. exp, sum and quotient add 4 roundings of 2 u.
    silu = np.abs(gates / (1 + np.exp(-gates)))
    error = (
        (1.1 * gate_error + 8 * UNIT * silu) * (np.abs(ups) + up_error) + silu * up_error + UNIT * np.abs(hidden_states)
    )
    largest = np.abs(hidden_states) + error
    if down_part.spec.bitwidth < 16:  # add half a step; the error may make the tile's largest value larger
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
    """Whole and partial chunks of 96 tokens, steps of several tokens, even and odd numbers of row blocks."""
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
    """Compare with the definition in float64, on the products of each matrix, which other tests check."""
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
    # A hidden value may be rounded the other way: by one of the 254 steps of its tile.
    slack = 1e-4 if expert.down.spec.bitwidth == 16 else 2e-2
    assert np.abs(out[:, 1] - (expected + biases[2])).max() <= slack * np.abs(expected).max()
    assert (out[:, 0] == SENTINEL).all()
    kernels.experts_of_token([expert], x[3:4], np.array([1], np.int32), alone)
    assert np.array_equal(bits(alone[0, 1]), bits(out[3, 1]))


def test_biases_are_checked(every: str) -> None:
    right = biases_of(96, 64)
    for options in (
        {"biases": right[:2]}, {"biases": [right[0], right[1], right[1]]}, {"activation": "tanh"},
        {"biases": [bias.astype(np.float64) for bias in right]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"bias|activation"):
            expert_of(*EXPERTS[0], **options)


@gate
@pytest.mark.parametrize(("width", "hidden", "texts"), EXPERTS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu", "relu", "gelu"])
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
    texts = (
        ("q4g32", "q3g32s", "q8"),
        ("q5g32s", "q6g32", "q5g32b"),
        ("bf16", "fp16", "bf16"),
        ("q2s", "q2", "fp16"),
        ("fp16", "q4g32", "q2"),
    )
    experts = [expert_of(width, hidden, text)[0] for text in texts]
    x, ranks = inputs(1, hidden), np.array([4, 0, 2, 1, 3], np.int32)
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


@gate
@pytest.mark.parametrize(("width", "hidden", "texts"), EXPERTS, ids=str)
def test_experts_without_a_gate(every: str, width: int, hidden: int, texts: tuple[str, str, str]) -> None:
    """Values below 0 become 0 between the products, and one token gives the same bits as several."""
    expert, (_, up_part, down_part) = expert_of(width, hidden, texts, activation="relu")
    x, tokens = inputs(5, hidden), np.arange(5, dtype=np.int32)
    middle = linear(up_part, x)
    assert (middle < 0).any() and (middle > 0).any()
    expected = linear(down_part, np.maximum(middle, 0))
    out, alone = np.full((5, 2, hidden), SENTINEL), np.full((1, 2, hidden), SENTINEL)
    kernels.expert_ffn(expert, x, tokens, np.ones(5, np.int32), out)
    assert np.array_equal(bits(out[:, 1]), bits(expected)) and (out[:, 0] == SENTINEL).all()
    kernels.experts_of_token([expert], x[3:4], np.array([1], np.int32), alone)
    assert np.array_equal(bits(alone[0, 1]), bits(out[3, 1]))
