"""Latent attention of a layer in one call gives the bits of its single steps, and refuses what does not fit.

tests/runtime/layers/test_layers.py compares it with its definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.conftest import need
from tests.kernels.packer import bits, random_matrix
from tests.kernels.products import gate, inputs, matrix_of
from tests.kernels.test_attention_layer import vector

HIDDEN, HEADS, RANK, PLAIN, ROTATED, VALUE, DOWN, SLOTS, CONTEXT = 96, 3, 64, 32, 16, 32, 32, 3, 40


def matrix(rows: int, columns: int, text: str, seed: int) -> kernels.PackedMatrix:
    return matrix_of(random_matrix(rows, columns, QuantSpec.parse(text), seed))


def layer(text: str = "q4g32s", has_down: bool = False, **more: Any) -> kernels.LatentLayer:
    angles = np.outer(np.arange(CONTEXT), 1 / 10 ** np.arange(ROTATED // 2)).astype(np.float32)
    plain: dict[str, Any] = {
        "norm": 1 + vector(HIDDEN, 2) / 4, "norm_eps": 1e-5,
        "query_down": matrix(DOWN, HIDDEN, text, 1) if has_down else None,
        "query": matrix(HEADS * (PLAIN + ROTATED), DOWN if has_down else HIDDEN, text, 2),
        "latent_down": matrix(RANK + ROTATED, HIDDEN, text, 3),
        "inner_norms": (vector(DOWN, 3) if has_down else None, vector(RANK, 4)), "inner_norm_eps": 1e-6,
        "key_up": tuple(matrix(RANK, PLAIN, text, 10 + head) for head in range(HEADS)),
        "value_up": tuple(matrix(VALUE, RANK, text, 20 + head) for head in range(HEADS)),
        "output": matrix(HIDDEN, HEADS * VALUE, text, 4), "rotation": (np.cos(angles), np.sin(angles)),
        "interleaved": True, "scale": 0.2, "residual_scale": 0.3,
    }  # fmt: skip
    return kernels.LatentLayer(**{**plain, **more})


def cache(kind: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((SLOTS, 1, CONTEXT, RANK + ROTATED)).astype(kind)


def places(tokens: int, ends: np.ndarray | None = None) -> kernels.TokenPlaces:
    drawn = np.sort(np.random.default_rng(tokens).permutation(SLOTS * CONTEXT)[:tokens]).astype(np.int32)
    return kernels.TokenPlaces(drawn // CONTEXT, drawn % CONTEXT, ends)


@gate
@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize("has_down", [False, True])
@pytest.mark.parametrize(
    "part", [{}, {"interleaved": False}, {"norm_bias": vector(HIDDEN, 5)}], ids=lambda part: "-".join(part) or "plain"
)
def test_it_is_its_steps(native: str, part: dict[str, Any], has_down: bool, tokens: int) -> None:
    ends = np.random.default_rng(2).integers(1, CONTEXT + 1, tokens).astype(np.int32)
    for text, kind, threads, seen in (
        ("q4g32s", np.float32, 1, None),
        ("bf16", np.float32, 3, ends),
        ("q8", np.float16, 2, None),
    ):
        kernels.set_threads(threads)
        own, found, expected = layer(text, has_down, **part), inputs(tokens, HIDDEN), inputs(tokens, HIDDEN)
        one, other = cache(kind), cache(kind)
        kernels.attend(own, found, one, one, places(tokens, seen))
        own.attend_in_steps(kernels, expected, other, other, places(tokens, seen))
        assert np.array_equal(bits(found), bits(expected)) and not np.array_equal(found, inputs(tokens, HIDDEN))
        assert one.tobytes() == other.tobytes() != cache(kind).tobytes(), "vectors are stored"


@gate
def test_every_instruction_set_gives_the_same_bits(pair: tuple[str, str]) -> None:
    found = []
    for name in pair:
        kernels.select(name)
        found.append(inputs(50, HIDDEN))
        own = cache()
        kernels.attend(layer(has_down=True), found[-1], own, own, places(50))
    assert np.array_equal(bits(found[0]), bits(found[1]))


WRONG: dict[str, dict[str, Any]] = {
    "norm": {"norm": vector(HIDDEN + 1, 1)},
    "query": {"query": matrix(HEADS * PLAIN, HIDDEN, "q8", 1)},
    "columns of the query": {"query": matrix(HEADS * (PLAIN + ROTATED), DOWN, "q8", 1)},
    "latent": {"latent_down": matrix(RANK - 1, HIDDEN, "q8", 1)},
    "latent norm": {"inner_norms": (None, vector(RANK + 1, 1))},
    "no latent norm": {"inner_norms": (None, None)},
    "norms": {"inner_norms": (vector(RANK, 1),)},
    "norm of the bottleneck": {"has_down": True, "inner_norms": (None, vector(RANK, 1))},
    "bottleneck": {"has_down": True, "query_down": matrix(DOWN, 2 * HIDDEN, "q8", 1)},
    "heads": {"key_up": (matrix(RANK, PLAIN, "q8", 1),)},
    "no heads": {"key_up": (), "value_up": ()},
    "a head": {"key_up": (*(matrix(RANK, PLAIN, "q8", 1) for _ in range(2)), matrix(RANK, 2 * PLAIN, "q8", 1))},
    "values": {"value_up": tuple(matrix(VALUE, PLAIN, "q8", 1) for _ in range(HEADS))},
    "output": {"output": matrix(HIDDEN, HEADS * RANK, "q8", 1)},
    "stream": {"output": matrix(HIDDEN + 1, HEADS * VALUE, "q8", 1)},
    "rotation": {"rotation": (np.zeros((CONTEXT, ROTATED), np.float32),) * 2},
    "one table": {"rotation": (np.zeros((CONTEXT, ROTATED // 2), np.float32),)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_layer_that_does_not_fit_is_refused(wrong: str) -> None:
    need("scalar")
    with pytest.raises(ValueError, match="expected"):
        layer(**WRONG[wrong])


def test_a_call_that_does_not_fit_is_refused_and_changes_nothing(native: str) -> None:
    hidden, own, right = inputs(2, HIDDEN), cache(), places(2)
    slots, last = right.slots, np.full_like(right.positions, CONTEXT)
    other = np.zeros((SLOTS, 1, CONTEXT, RANK), np.float32)
    longer = np.zeros((SLOTS, 1, CONTEXT + 1, RANK + ROTATED), np.float32)
    for arguments in (
        (inputs(2, HIDDEN + 1), own, own, right),
        (hidden, other, other, right),
        (hidden, longer, longer, kernels.TokenPlaces(slots, last)),
        (hidden, own, own, kernels.TokenPlaces(slots + SLOTS, right.positions)),
        (hidden, own, own, places(2, np.zeros(2, np.int32))),
    ):
        with pytest.raises(ValueError, match="expected"):
            kernels.attend(layer(), *arguments)
    assert np.array_equal(hidden, inputs(2, HIDDEN)) and own.tobytes() == cache().tobytes()
