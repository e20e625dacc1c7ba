"""Latent attention against the definition: keys and values of every head made, then plain attention."""

from __future__ import annotations

import numpy as np
import pytest

from moec.manifests.model import AttentionSpec, LatentSpec, RopeSpec
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.layers.attention import LatentAttention, RotaryTables
from moec.runtime.layers.norms import Norm
from tests.kernels.packer import pack_16_bit

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
