"""Experts with two projections and ReLU, compared with the products of each matrix, which other tests check (G8)."""

from __future__ import annotations

import numpy as np
import pytest

from moec.runtime import kernels
from tests.kernels.packer import bits
from tests.kernels.products import EXPERTS, SENTINEL, expert_of, gate, inputs, linear


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
