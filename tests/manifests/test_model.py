"""ModelSpec refuses what cannot be computed, and knows its shapes; the error tree is the one that is documented."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moec.manifests import errors
from moec.manifests.model import (
    AttentionSpec,
    ExpertKey,
    ExpertsSpec,
    LatentSpec,
    RelativeBiasSpec,
    RopeSpec,
    RouterSpec,
)
from tests.manifests.examples import layer_spec, model_spec

ROPE = RopeSpec(10000.0, 8)
ATTENTION = AttentionSpec(4, 2, 8, ROPE)
EXPERTS = ExpertsSpec(4, 2, 64, "silu", RouterSpec("softmax", True))


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        *((ROPE, {"theta": value}) for value in (0.0, -1.0, 1e-300, 1e308, math.inf, math.nan)),
        *((ROPE, {"rotary_size": value}) for value in (0, -2, 3, 4098)),
        *((ATTENTION, {"num_heads": value}) for value in (0, -1, 3, 4097)),
        *((ATTENTION, {"num_kv_heads": value}) for value in (0, -1, 3, 5)),
        *((ATTENTION, {"head_size": value}) for value in (0, 4, 4097)),
        *((ATTENTION, {"sliding_window": value}) for value in (-1, 1 << 40)),
        *((EXPERTS, {"count": value}) for value in (0, -1, 1, 65536)),
        *((EXPERTS, {"top_k": value}) for value in (0, -1, 5)),
        *((EXPERTS, {"width": value}) for value in (0, -1, 1 << 21)),
    ],
)
def test_parts_out_of_range(base: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(base, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0}, {"hidden_size": 1 << 21}, {"vocab_size": 0}, {"vocab_size": 1 << 25}, {"max_positions": 0},
        {"max_positions": 1 << 29}, {"norm_eps": -1e-9}, {"norm_eps": 1.0}, {"norm_eps": math.nan},
        {"eos_token_ids": (50,)}, {"eos_token_ids": (-1,)}, {"layers": (layer_spec(),) * 1025},
    ],
)  # fmt: skip
def test_models_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        model_spec(**changes)
    with pytest.raises(ValueError):
        replace(model_spec(), layers=())


def test_shapes() -> None:
    model = model_spec()
    assert model.unit_shape(0, "gate") == model.unit_shape(0, "up") == (64, 32)
    assert model.unit_shape(1, "down") == (32, 32)
    assert model.kv_bytes_per_position == 2 * (2 * 8 * 2 * 4)
    assert model.expert_keys()[2:] == (ExpertKey(0, 2), *(ExpertKey(1, expert) for expert in range(4)))
    shapes = model.dense_shapes()
    assert list(shapes)[:4] == ["embedding", "layers.0.attention_norm", "layers.0.query", "layers.0.key"]
    assert shapes["layers.0.key"] == (16, 32) and shapes["layers.0.output"] == (32, 32)
    assert shapes["layers.1.router"] == (4, 32) and shapes["lm_head"] == (50, 32)
    assert list(shapes)[-2:] == ["final_norm", "lm_head"]
    assert "lm_head" not in replace(model, tie_embeddings=True).dense_shapes()


def test_the_error_tree_is_the_documented_one() -> None:
    """Names, parents and exit codes as the docstring draws them."""
    stack: list[tuple[int, type[Exception]]] = []
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.split()
        if not words or not line.startswith("    ") or not hasattr(errors, words[0]):
            continue
        depth, found = len(line) - len(line.lstrip()), getattr(errors, words[0])
        stack = [item for item in stack if item[0] < depth]
        assert found.__base__ is (stack[-1][1] if stack else Exception)
        if len(words) > 1 and words[1].isdigit():
            assert found.exit_code == int(words[1])
        stack.append((depth, found))
        drawn[words[0]] = found
    assert set(drawn) == {name for name, item in vars(errors).items() if isinstance(item, type)}
    assert {e.exit_code for e in drawn.values() if issubclass(e, errors.BundleError)} == {3}
    others = {name: e.exit_code for name, e in drawn.items() if not issubclass(e, errors.BundleError)}
    told = {"DeviceRefused": 4, "StoreFailed": 5, "DiskFull": 75, "TryAgain": 75}
    assert {name: code for name, code in others.items() if code != 1} == told


def test_a_message_carries_its_remedy() -> None:
    assert str(errors.MoecError("it is so", "do that")) == "it is so (hint: do that)"
    assert str(errors.MoecError("it is so")) == "it is so"


def test_latent_attention_without_a_rotary_embedding_is_refused() -> None:
    latent = LatentSpec(query_rank=0, rank=16, plain_size=16, value_size=16, norm_eps=1e-6)
    AttentionSpec(2, 2, 24, ROPE, latent=latent)
    with pytest.raises(ValueError, match="latent attention needs a rotary embedding"):
        AttentionSpec(2, 2, 16, None, latent=latent)


def test_layers_that_share_a_relative_bias_have_as_many_heads() -> None:
    bias = RelativeBiasSpec(8, 20)
    first, second = layer_spec(), layer_spec()
    first = replace(first, attention=replace(first.attention, rope=None, relative_bias=bias))
    second = replace(second, attention=replace(second.attention, rope=None, relative_bias=bias, num_heads=2))
    with pytest.raises(ValueError, match="layer 1: layers that share a relative bias have as many heads"):
        model_spec((first, second))
    assert model_spec((first, first)).dense_shapes()["layers.0.relative_bias"] == (32,)
    model_spec((layer_spec(), replace(second, attention=replace(second.attention, relative_bias=None))))
