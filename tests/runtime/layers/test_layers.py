"""Norms, latent attention and relative biases against their definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersAttention

from moec.manifests.model import AttentionSpec, LatentSpec, RelativeBiasSpec, RopeSpec
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.layers.attention import LatentAttention, RotaryTables, bias_by_distance, distance_buckets
from moec.runtime.layers.norms import Norm, stream_norms
from tests.kernels.packer import pack_16_bit
from tests.manifests.examples import model_spec

ROWS = np.random.default_rng(2).normal(3, 2, (5, 40)).astype(np.float32)
WEIGHT, BIAS = np.random.default_rng(3).normal(size=(2, 40)).astype(np.float32)


def test_with_a_bias_the_mean_goes_first() -> None:
    wide, before = ROWS.astype(np.float64), ROWS.copy()
    centred = wide - wide.mean(axis=1, keepdims=True)
    rms = WEIGHT * wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    layer = WEIGHT * centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) + BIAS
    assert Norm(WEIGHT, None, 1e-5)(ROWS) == pytest.approx(rms, rel=1e-4, abs=1e-5)
    assert Norm(WEIGHT, BIAS, 1e-5)(ROWS) == pytest.approx(layer, rel=1e-4, abs=1e-5)
    assert np.array_equal(ROWS, before)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_every_norm_of_the_stream_has_its_own_weights(kind: str) -> None:
    model = replace(model_spec(), norm=kind)
    generator = np.random.default_rng(4)
    dense = {name: generator.normal(size=shape).astype(np.float32) for name, shape in model.dense_shapes().items()}
    norms = stream_norms(model, dense)
    layers = [f"layers.{at}.{name}" for at in range(model.num_layers) for name in ("attention_norm", "experts_norm")]
    assert sorted(norms) == sorted([*layers, "final_norm"])
    hidden = generator.normal(size=(1, model.hidden_size)).astype(np.float32)
    for name, norm in norms.items():
        bias = dense[f"{name}_bias"] if kind == "layer" else None
        assert np.array_equal(norm(hidden), Norm(dense[name], bias, model.norm_eps)(hidden))


HIDDEN, HEADS, RANK, PLAIN, ROTARY, VALUE, CONTEXT = 64, 3, 32, 16, 8, 16, 12
BF16 = QuantSpec.parse("bf16")


def rotated(x: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
    """[..., R] of one position, the pairs turned one by one; the result in halves."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    angle = position * 10_000.0 ** (-np.arange(half) / half)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


@pytest.mark.parametrize("query_rank", [0, 32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_attention_over_keys_and_values_that_are_never_made(query_rank: int, interleaved: bool) -> None:
    draw = np.random.default_rng(2)
    shapes = {
        "query": (HEADS * (PLAIN + ROTARY), query_rank or HIDDEN), "latent_down": (RANK + ROTARY, HIDDEN),
        "key_up": (HEADS * RANK, PLAIN), "value_up": (HEADS * VALUE, RANK), "output": (HIDDEN, HEADS * VALUE),
        **({"query_down": (query_rank, HIDDEN)} if query_rank else {}),
    }  # fmt: skip
    plain, packed = {}, {}
    for name, shape in shapes.items():
        bits = (draw.normal(0, 0.2, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        plain[name] = (bits.astype(np.uint32) << 16).view(np.float32)
        packed[name] = kernels.PackedMatrix(pack_16_bit(plain[name], BF16), *shape, BF16)
    norms = {"latent_norm": draw.uniform(0.5, 1.5, RANK).astype(np.float32)}
    norms["query_down_norm"] = draw.uniform(0.5, 1.5, query_rank).astype(np.float32)
    latent = LatentSpec(query_rank, RANK, PLAIN, VALUE, 1e-6)
    rope = RopeSpec(10_000.0, ROTARY, interleaved)
    spec = AttentionSpec(HEADS, HEADS, PLAIN + ROTARY, rope, scale=0.3, latent=latent)
    stream_norm = Norm(draw.uniform(0.5, 1.5, HIDDEN).astype(np.float32), None, 1e-6)
    run = LatentAttention(spec, latent, {**packed, **norms}, stream_norm, RotaryTables(rope, CONTEXT), 0.5)
    cache = np.zeros((1, 1, CONTEXT, RANK + ROTARY), np.float32)
    hidden = draw.normal(size=(CONTEXT, HIDDEN)).astype(np.float32)
    found = hidden.copy()
    slots = np.zeros(CONTEXT, np.int32)
    positions = np.arange(CONTEXT, dtype=np.int32)
    parts = [slice(5), *(slice(at, at + 1) for at in range(5, CONTEXT))]
    for part in parts:
        run(found[part], kernels.TokenPlaces(slots[part], positions[part]), cache, cache)

    def norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)

    x = norm(hidden, stream_norm.weight)
    down = norm(x @ plain["query_down"].T, norms["query_down_norm"]) if query_rank else x
    queries = (down @ plain["query"].T).reshape(CONTEXT, HEADS, -1)
    shared = x @ plain["latent_down"].T
    vectors = norm(shared[:, :RANK], norms["latent_norm"])
    key_up = plain["key_up"].reshape(HEADS, RANK, PLAIN)
    value_up = plain["value_up"].reshape(HEADS, VALUE, RANK)
    keys = np.einsum("tr,hrp->thp", vectors, key_up)
    values = np.einsum("tr,hvr->thv", vectors, value_up)
    turned = np.stack([rotated(shared[at, RANK:], at, interleaved) for at in range(CONTEXT)])
    expected = np.empty((CONTEXT, HEADS, VALUE))
    for at in range(CONTEXT):
        for head in range(HEADS):
            scores = keys[: at + 1, head] @ queries[at, head, :PLAIN]
            scores = scores + turned[: at + 1] @ rotated(queries[at, head, PLAIN:], at, interleaved)
            shares = np.exp(0.3 * (scores - scores.max()))
            expected[at, head] = shares @ values[: at + 1, head] / shares.sum()
    assert found == pytest.approx(hidden + 0.5 * expected.reshape(CONTEXT, -1) @ plain["output"].T, abs=2e-5)


FURTHEST = 5000


@pytest.mark.oracle
@pytest.mark.parametrize("sees_ahead", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 512), (4, 3), (32, 100), (16, 64)])
def test_buckets_are_those_of_transformers(buckets: int, max_distance: int, sees_ahead: bool) -> None:
    distances = np.arange(-FURTHEST, FURTHEST + 1)
    expected = SwitchTransformersAttention._relative_position_bucket(
        torch.from_numpy(distances), sees_ahead, buckets, max_distance
    )
    found = distance_buckets(distances, RelativeBiasSpec(buckets, max_distance), sees_ahead)
    assert np.array_equal(found, expected.numpy())


@pytest.mark.parametrize("sees_ahead", [False, True])
def test_each_head_has_its_own_number_for_a_distance(sees_ahead: bool) -> None:
    spec, heads, context = RelativeBiasSpec(8, 20), 3, 30
    table = np.random.default_rng(1).normal(size=spec.buckets * heads).astype(np.float32)
    found = bias_by_distance(table, spec, context, sees_ahead)
    assert found.shape == (heads, 2 * context - 1) and found.dtype == np.float32 and found.flags.c_contiguous
    for distance in (-29, -3, 0, 1, 29):
        (bucket,) = distance_buckets(np.array([distance]), spec, sees_ahead)
        expected = [table[bucket * heads + head] for head in range(heads)]
        assert found[:, context - 1 + distance].tolist() == expected
