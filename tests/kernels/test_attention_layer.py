"""Attention of a layer in one call gives the bits of its single steps, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.conftest import need
from tests.kernels.packer import bits, random_matrix
from tests.kernels.products import gate, inputs, matrix_of

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, SLOTS, CONTEXT = 96, 6, 2, 32, 3, 40
QUERIES, KEYS = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
SHAPES = ((QUERIES, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, QUERIES))


def vector(size: int, seed: int) -> np.ndarray:
    return inputs(1, size, seed)[0]


def turned(features: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(CONTEXT), 1 / 10 ** (np.arange(features // 2) / features))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def layer(text: str = "q4g32s", **more: Any) -> kernels.AttentionLayer:
    """Return a layer of random weights. more: further fields of the layer."""
    matrices = tuple(matrix_of(random_matrix(*shape, QuantSpec.parse(text), at)) for at, shape in enumerate(SHAPES))
    plain: dict[str, Any] = {
        "norm": 1 + vector(HIDDEN, 2) / 4, "norm_eps": 1e-5, "matrices": matrices, "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE, "scale": 0.2,
    }  # fmt: skip
    return kernels.AttentionLayer(**{**plain, **more})


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer norm": {"norm_bias": vector(HIDDEN, 3)},
    "biases": {"biases": tuple(vector(rows, 4) for rows, _ in SHAPES)},
    "bias of the output": {"biases": (None, None, None, vector(HIDDEN, 4))},
    "norms by head": {"head_norms": (vector(HEAD_SIZE, 5), vector(HEAD_SIZE, 6)), "head_norm_eps": 1e-6},
    "norms of all heads": {"head_norms": (vector(QUERIES, 5), vector(KEYS, 6)), "head_norm_eps": 1e-6},
    "rotation": {"rotation": turned(HEAD_SIZE)},
    "rotation of pairs": {"rotation": turned(HEAD_SIZE // 2), "interleaved": True},
    "window": {"window": 5},
    "sinks": {"sinks": vector(HEADS, 7)},
    "bias of distances": {"distance_bias": inputs(HEADS, 2 * CONTEXT - 1, 8)},
    "gated heads": {"gate": matrix_of(random_matrix(HEADS, HIDDEN, QuantSpec.parse("q8"), 9))},
    "gated features": {
        "gate": matrix_of(random_matrix(QUERIES, HIDDEN, QuantSpec.parse("bf16"), 9)),
        "gate_function": "softplus",
    },
    "norm after": {"after_norm": 1 + vector(HIDDEN, 10) / 4},
    "scaled": {"residual_scale": 0.3},
}
PARTS["together"] = {name: part for each in PARTS.values() for name, part in each.items()}


class Cache:
    """Random keys and values, and random places of tokens in all slots."""

    def __init__(self, tokens: int, kind: Any = np.float32) -> None:
        shape = (SLOTS, KV_HEADS, CONTEXT, HEAD_SIZE)
        draw = np.random.default_rng(tokens)
        self.arrays = tuple(draw.standard_normal(shape).astype(kind) for _ in range(2))
        places = draw.permutation(SLOTS * CONTEXT)[:tokens].astype(np.int32)
        places.sort()
        self.places = kernels.TokenPlaces(places // CONTEXT, places % CONTEXT)

    def copy(self) -> list[np.ndarray]:
        return [array.copy() for array in self.arrays]


@gate
@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize("part", PARTS)
def test_it_is_its_steps(native: str, part: str, tokens: int) -> None:
    cache = Cache(tokens)
    for text, kind, threads in (("q4g32s", np.float32, 1), ("bf16", np.float32, 3), ("q8", np.float16, 2)):
        kernels.set_threads(threads)
        own, found, expected = layer(text, **PARTS[part]), inputs(tokens, HIDDEN), inputs(tokens, HIDDEN)
        arrays = [Cache(tokens, kind).copy() for _ in range(2)]
        kernels.attend(own, found, arrays[0], cache.places)
        own.mix_in_steps(kernels, expected, arrays[1], cache.places)
        assert np.array_equal(bits(found), bits(expected)) and not np.array_equal(found, inputs(tokens, HIDDEN))
        for one, other in zip(*arrays, strict=True):
            assert one.tobytes() == other.tobytes()
        assert arrays[0][0].tobytes() != Cache(tokens, kind).arrays[0].tobytes(), "keys are stored"


@gate
def test_of_an_encoder_too(native: str) -> None:
    """Every token sees the positions before its end, as in an encoder."""
    cache = Cache(30)
    ends = np.random.default_rng(1).integers(1, CONTEXT + 1, 30).astype(np.int32)
    with_ends = kernels.TokenPlaces(cache.places.slots, cache.places.positions, ends)
    own, found, expected, causal = layer(), *(inputs(30, HIDDEN) for _ in range(3))
    kernels.attend(own, found, cache.copy(), with_ends)
    own.mix_in_steps(kernels, expected, cache.copy(), with_ends)
    kernels.attend(own, causal, cache.copy(), cache.places)
    assert np.array_equal(bits(found), bits(expected)) and not np.array_equal(found, causal)


@gate
def test_every_instruction_set_gives_the_same_bits(pair: tuple[str, str]) -> None:
    cache, found = Cache(50), []
    for name in pair:
        kernels.select(name)
        found.append(inputs(50, HIDDEN))
        kernels.attend(layer(**{**PARTS["together"], "window": 0}), found[-1], cache.copy(), cache.places)
    assert np.array_equal(bits(found[0]), bits(found[1]))


@gate
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_attention_as_it_is_defined(every: str, interleaved: bool) -> None:
    """Compare with the formulas in float64: norm, products, norms of heads, rotation, softmax, output, sum."""
    parts = [random_matrix(*shape, QuantSpec.parse("bf16"), at) for at, shape in enumerate(SHAPES)]
    query, key, value, output = (part.weights.astype(np.float64) for part in parts)
    norms, (cos, sin) = (vector(HEAD_SIZE, 5), vector(HEAD_SIZE, 6)), turned(HEAD_SIZE)
    more = {"head_norms": norms, "head_norm_eps": 1e-6, "residual_scale": 0.5}
    own = layer("bf16", **more, rotation=(cos, sin), interleaved=interleaved)
    hidden, positions = inputs(CONTEXT, HIDDEN), np.arange(CONTEXT, dtype=np.int32)

    def normed(rows: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return weight * rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + eps)

    def turn(heads: np.ndarray) -> np.ndarray:
        pairs = heads[..., 0::2] + 1j * heads[..., 1::2]
        if not interleaved:
            pairs = heads[..., : HEAD_SIZE // 2] + 1j * heads[..., HEAD_SIZE // 2 :]
        rotated = pairs * (cos + 1j * sin)[:, None]
        return np.concatenate([rotated.real, rotated.imag], axis=-1)

    x = normed(hidden.astype(np.float64), own.norm, 1e-5)
    queries = turn(normed((x @ query.T).reshape(CONTEXT, HEADS, -1), norms[0], 1e-6))
    keys = turn(normed((x @ key.T).reshape(CONTEXT, KV_HEADS, -1), norms[1], 1e-6))
    values, shared = (x @ value.T).reshape(CONTEXT, KV_HEADS, -1), HEADS // KV_HEADS
    scores = np.einsum("thd,shd->hts", queries, keys.repeat(shared, axis=1)) * 0.2
    scores[:, np.triu(np.ones((CONTEXT, CONTEXT), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    seen = np.einsum("hts,shd->thd", shares, values.repeat(shared, axis=1)).reshape(CONTEXT, -1)
    expected = hidden + 0.5 * seen @ output.T
    arrays = Cache(1).copy()
    for part in (slice(9), slice(9, CONTEXT)):  # later tokens see what earlier calls stored
        kernels.attend(own, hidden[part], arrays, kernels.TokenPlaces(np.zeros_like(positions[part]), positions[part]))
    assert hidden == pytest.approx(expected, rel=1e-4, abs=1e-4)


WRONG: dict[str, dict[str, Any]] = {
    "norm": {"norm": vector(HIDDEN + 1, 2)},
    "no norm": {"norm": None},
    "norm bias": {"norm_bias": vector(HIDDEN - 1, 2)},
    "heads": {"kv_heads": 4},
    "no heads": {"kv_heads": 0},
    "matrices": {"matrices": layer().matrices[:3]},
    "order of matrices": {"matrices": layer().matrices[::-1]},
    "output": {"matrices": (*layer().matrices[:3], layer().matrices[0])},
    "a matrix that is none": {"matrices": (*layer().matrices[:3], None)},
    "bias": {"biases": (vector(KEYS, 1), None, None, None)},
    "biases": {"biases": (None,)},
    "head norms": {"head_norms": (vector(HEAD_SIZE + 1, 1), vector(HEAD_SIZE, 1))},
    "one norm of all heads": {"head_norms": (vector(QUERIES, 1), vector(HEAD_SIZE, 1))},
    "rotation": {"rotation": turned(HEAD_SIZE + 2)},
    "sines": {"rotation": (turned(HEAD_SIZE)[0], turned(HEAD_SIZE - 2)[1])},
    "window": {"window": -1},
    "sinks": {"sinks": vector(KV_HEADS, 1)},
    "dtype": {"sinks": vector(HEADS, 1).astype(np.float64)},
}


ZERO = np.zeros(1, np.int32)
PLACE = kernels.TokenPlaces(ZERO, ZERO)
CALLS: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": inputs(1, HIDDEN + 1)},
    "keys": {"k_cache": np.zeros((SLOTS, KV_HEADS, CONTEXT, HEAD_SIZE + 1), np.float32)},
    "heads": {name: np.zeros((SLOTS, HEADS, CONTEXT, HEAD_SIZE), np.float32) for name in ("k_cache", "v_cache")},
    "two types": {"v_cache": np.zeros((SLOTS, KV_HEADS, CONTEXT, HEAD_SIZE), np.float16)},
    "slot": {"places": kernels.TokenPlaces(np.full(1, SLOTS, np.int32), ZERO)},
    "position": {"places": kernels.TokenPlaces(ZERO, np.full(1, CONTEXT, np.int32))},
    "positions": {"places": kernels.TokenPlaces(ZERO, np.zeros(2, np.int32))},
    "end": {"places": kernels.TokenPlaces(ZERO, ZERO, ZERO)},
}


@pytest.mark.parametrize("wrong", CALLS)
def test_a_call_that_does_not_fit_is_refused_and_changes_nothing(native: str, wrong: str) -> None:
    keys, values = Cache(1).copy()
    hidden = inputs(1, HIDDEN)
    call = {"hidden": hidden, "k_cache": keys, "v_cache": values, "places": PLACE, **CALLS[wrong]}
    with pytest.raises(ValueError, match="expected"):
        kernels.attend(layer(), call["hidden"], (call["k_cache"], call["v_cache"]), call["places"])
    assert np.array_equal(hidden, inputs(1, HIDDEN)) and np.array_equal(keys, Cache(1).arrays[0])


@gate
def test_it_follows_matrices_that_move(native: str) -> None:
    """Matrices may move as experts do. Their old memory then has another use."""
    own, cache, found, expected = layer(), Cache(7), inputs(7, HIDDEN), inputs(7, HIDDEN)
    for matrix in own.matrices:
        matrix.move_to(matrix.data.copy())  # random_matrix gives the same memory to other tests
    kernels.attend(own, expected, cache.copy(), cache.places)
    for matrix in own.matrices:
        before, now = matrix.data, matrix.data.copy()
        matrix.move_to(now)
        before[:] = 0
    kernels.attend(own, found, cache.copy(), cache.places)
    assert np.array_equal(bits(found), bits(expected))


def test_no_tokens_are_no_work(every: str) -> None:
    cache = Cache(1)
    places = kernels.TokenPlaces(np.empty(0, np.int32), np.empty(0, np.int32))
    kernels.attend(layer(**PARTS["together"]), np.empty((0, HIDDEN), np.float32), cache.copy(), places)


def test_tables_of_rotation_and_distances_hold_for_the_cache_they_are_used_with(native: str) -> None:
    longer = [np.zeros((1, KV_HEADS, CONTEXT + 1, HEAD_SIZE), np.float32) for _ in range(2)]
    last = kernels.TokenPlaces(ZERO, np.full(1, CONTEXT, np.int32))
    for part in ("rotation", "bias of distances"):
        with pytest.raises(ValueError, match="expected"):
            kernels.attend(layer(**PARTS[part]), inputs(1, HIDDEN), longer, last)
    kernels.attend(layer(), inputs(1, HIDDEN), longer, last)


# -- latent attention; tests/runtime/layers/test_layers.py compares it with its definition ----------------------------

LATENT_HEADS, RANK, PLAIN, ROTATED, VALUE, DOWN = 3, 64, 32, 16, 32, 32


def matrix(rows: int, columns: int, text: str, seed: int) -> kernels.PackedMatrix:
    return matrix_of(random_matrix(rows, columns, QuantSpec.parse(text), seed))


def latent_layer(text: str = "q4g32s", has_down: bool = False, **more: Any) -> kernels.LatentLayer:
    angles = np.outer(np.arange(CONTEXT), 1 / 10 ** np.arange(ROTATED // 2)).astype(np.float32)
    plain: dict[str, Any] = {
        "norm": 1 + vector(HIDDEN, 2) / 4, "norm_eps": 1e-5,
        "query_down": matrix(DOWN, HIDDEN, text, 1) if has_down else None,
        "query": matrix(LATENT_HEADS * (PLAIN + ROTATED), DOWN if has_down else HIDDEN, text, 2),
        "latent_down": matrix(RANK + ROTATED, HIDDEN, text, 3),
        "inner_norms": (vector(DOWN, 3) if has_down else None, vector(RANK, 4)), "inner_norm_eps": 1e-6,
        "key_up": tuple(matrix(RANK, PLAIN, text, 10 + head) for head in range(LATENT_HEADS)),
        "value_up": tuple(matrix(VALUE, RANK, text, 20 + head) for head in range(LATENT_HEADS)),
        "output": matrix(HIDDEN, LATENT_HEADS * VALUE, text, 4), "rotation": (np.cos(angles), np.sin(angles)),
        "interleaved": True, "scale": 0.2, "residual_scale": 0.3,
    }  # fmt: skip
    return kernels.LatentLayer(**{**plain, **more})


def latent_cache(kind: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((SLOTS, 1, CONTEXT, RANK + ROTATED)).astype(kind)


def latent_places(tokens: int, ends: np.ndarray | None = None) -> kernels.TokenPlaces:
    drawn = np.sort(np.random.default_rng(tokens).permutation(SLOTS * CONTEXT)[:tokens]).astype(np.int32)
    return kernels.TokenPlaces(drawn // CONTEXT, drawn % CONTEXT, ends)


@gate
@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize("has_down", [False, True])
@pytest.mark.parametrize(
    "part", [{}, {"interleaved": False}, {"norm_bias": vector(HIDDEN, 5)}], ids=lambda part: "-".join(part) or "plain"
)
def test_latent_attention_is_its_steps(native: str, part: dict[str, Any], has_down: bool, tokens: int) -> None:
    ends = np.random.default_rng(2).integers(1, CONTEXT + 1, tokens).astype(np.int32)
    for text, kind, threads, seen in (
        ("q4g32s", np.float32, 1, None),
        ("bf16", np.float32, 3, ends),
        ("q8", np.float16, 2, None),
    ):
        kernels.set_threads(threads)
        own, found, expected = latent_layer(text, has_down, **part), inputs(tokens, HIDDEN), inputs(tokens, HIDDEN)
        one, other = latent_cache(kind), latent_cache(kind)
        kernels.attend(own, found, (one, one), latent_places(tokens, seen))
        own.mix_in_steps(kernels, expected, (other, other), latent_places(tokens, seen))
        assert np.array_equal(bits(found), bits(expected)) and not np.array_equal(found, inputs(tokens, HIDDEN))
        assert one.tobytes() == other.tobytes() != latent_cache(kind).tobytes(), "vectors are stored"


@gate
def test_every_instruction_set_gives_the_same_bits_of_latent_attention(pair: tuple[str, str]) -> None:
    found = []
    for name in pair:
        kernels.select(name)
        found.append(inputs(50, HIDDEN))
        own = latent_cache()
        kernels.attend(latent_layer(has_down=True), found[-1], (own, own), latent_places(50))
    assert np.array_equal(bits(found[0]), bits(found[1]))


WRONG_LATENT: dict[str, dict[str, Any]] = {
    "norm": {"norm": vector(HIDDEN + 1, 1)},
    "query": {"query": matrix(LATENT_HEADS * PLAIN, HIDDEN, "q8", 1)},
    "columns of the query": {"query": matrix(LATENT_HEADS * (PLAIN + ROTATED), DOWN, "q8", 1)},
    "latent": {"latent_down": matrix(RANK - 1, HIDDEN, "q8", 1)},
    "latent norm": {"inner_norms": (None, vector(RANK + 1, 1))},
    "no latent norm": {"inner_norms": (None, None)},
    "norms": {"inner_norms": (vector(RANK, 1),)},
    "norm of the bottleneck": {"has_down": True, "inner_norms": (None, vector(RANK, 1))},
    "bottleneck": {"has_down": True, "query_down": matrix(DOWN, 2 * HIDDEN, "q8", 1)},
    "heads": {"key_up": (matrix(RANK, PLAIN, "q8", 1),)},
    "no heads": {"key_up": (), "value_up": ()},
    "a head": {"key_up": (*(matrix(RANK, PLAIN, "q8", 1) for _ in range(2)), matrix(RANK, 2 * PLAIN, "q8", 1))},
    "values": {"value_up": tuple(matrix(VALUE, PLAIN, "q8", 1) for _ in range(LATENT_HEADS))},
    "output": {"output": matrix(HIDDEN, LATENT_HEADS * RANK, "q8", 1)},
    "stream": {"output": matrix(HIDDEN + 1, LATENT_HEADS * VALUE, "q8", 1)},
    "rotation": {"rotation": (np.zeros((CONTEXT, ROTATED), np.float32),) * 2},
    "one table": {"rotation": (np.zeros((CONTEXT, ROTATED // 2), np.float32),)},
}


@pytest.mark.parametrize(
    ("build", "changes"),
    [*((layer, wrong) for wrong in WRONG.values()), *((latent_layer, wrong) for wrong in WRONG_LATENT.values())],
    ids=[*WRONG, *(f"latent, {name}" for name in WRONG_LATENT)],
)
def test_a_layer_that_does_not_fit_is_refused(build: Callable[..., Any], changes: dict[str, Any]) -> None:
    need("scalar")
    with pytest.raises((ValueError, TypeError), match=r"expected|incompatible"):
        build(**changes)


def test_a_latent_call_that_does_not_fit_is_refused_and_changes_nothing(native: str) -> None:
    hidden, own, right = inputs(2, HIDDEN), latent_cache(), latent_places(2)
    slots, last = right.slots, np.full_like(right.positions, CONTEXT)
    other = np.zeros((SLOTS, 1, CONTEXT, RANK), np.float32)
    longer = np.zeros((SLOTS, 1, CONTEXT + 1, RANK + ROTATED), np.float32)
    for arguments in (
        (inputs(2, HIDDEN + 1), own, own, right),
        (hidden, other, other, right),
        (hidden, longer, longer, kernels.TokenPlaces(slots, last)),
        (hidden, own, own, kernels.TokenPlaces(slots + SLOTS, right.positions)),
        (hidden, own, own, latent_places(2, np.zeros(2, np.int32))),
    ):
        with pytest.raises(ValueError, match="expected"):
            kernels.attend(latent_layer(), arguments[0], arguments[1:3], arguments[3])
    assert np.array_equal(hidden, inputs(2, HIDDEN)) and own.tobytes() == latent_cache().tobytes()
