"""ModelSpec refuses what cannot be computed, and knows its shapes; the error tree is the one that is documented."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moec.manifests import errors
from moec.manifests.bundle import ExpertEntry
from moec.manifests.codec import DecodeError, from_plain, json_schema, to_plain
from moec.manifests.model import (
    AttentionSpec,
    EncoderSpec,
    ExpertKey,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    LongRopeSpec,
    ModelSpec,
    RelativeBiasSpec,
    RopeSpec,
    RouterSpec,
    StaticRouting,
    UnitKey,
)
from moec.manifests.path_tables import why_no_paths
from moec.manifests.quant import QuantSpec
from tests.manifests.examples import (
    CAPPED,
    CROSS,
    ENCODER_LAYERS,
    ROUTED,
    ROUTER,
    SELF,
    WITH_ENCODER,
    XXH3,
    layer_spec,
    model_spec,
)

ROPE = RopeSpec(10000.0, 8)
ATTENTION = AttentionSpec(4, 2, 8, ROPE)
LATENT = LatentSpec(query_rank=0, rank=16, plain_size=16, value_size=16, norm_eps=1e-6)
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


def test_layers_that_share_a_relative_bias_have_as_many_heads() -> None:
    bias = RelativeBiasSpec(8, 20)
    first, second = layer_spec(), layer_spec()
    first = replace(first, attention=replace(first.attention, rope=None, relative_bias=bias))
    second = replace(second, attention=replace(second.attention, rope=None, relative_bias=bias, num_heads=2))
    with pytest.raises(ValueError, match="layer 1: layers that share a relative bias have as many heads"):
        model_spec((first, second))
    assert model_spec((first, first)).dense_shapes()["layers.0.relative_bias"] == (32,)
    model_spec((layer_spec(), replace(second, attention=replace(second.attention, relative_bias=None))))


def with_layer(index: int, **changes: Any) -> ModelSpec:
    layers = list(ENCODER_LAYERS)
    layers[index] = replace(layers[index], **changes)
    return replace(WITH_ENCODER, layers=tuple(layers))


def test_shapes_of_an_encoder() -> None:
    shapes = WITH_ENCODER.dense_shapes()
    assert shapes["layers.0.relative_bias"] == shapes["layers.2.relative_bias"] == (16,)
    assert [name for name in shapes if name.endswith("relative_bias")] == [
        "layers.0.relative_bias", "layers.2.relative_bias",
    ]  # fmt: skip
    assert [name for name in shapes if name.startswith("layers.3.cross")] == [
        f"layers.3.cross_{name}" for name in ("attention_norm", "query", "key", "value", "output")
    ]
    assert not any("cross" in name for name in shapes if name.startswith(("layers.0.", "layers.1.")))
    assert "layers.0.shared_gate" not in shapes and shapes["layers.0.shared_up"] == (64, 32)
    assert list(shapes)[-2:] == ["encoder_norm", "final_norm"]
    assert WITH_ENCODER.unit_keys()[:3] == (UnitKey(1, 0, "up"), UnitKey(1, 0, "down"), UnitKey(1, 1, "up"))
    # One pair for all layers of the encoder, one for each of the decoder, and one for what each sees of the encoder.
    assert WITH_ENCODER.kv_bytes_per_position == (1 + 3 + 3) * 2 * 4 * 2 * 16


def test_the_layer_that_runs_next() -> None:
    assert [WITH_ENCODER.layer_after(layer) for layer in range(5)] == [1, 2, 3, 4, 2]
    assert WITH_ENCODER.layer_after(4, 3) == WITH_ENCODER.layer_after(3, 1) == 4
    plain = model_spec()
    assert [plain.layer_after(0, ahead) for ahead in (1, 2, 3)] == [1, 0, 1]


def test_an_expert_without_a_gate() -> None:
    spec = QuantSpec.parse("q4g32")
    entry = ExpertEntry(1, 0, "experts-00001.safetensors", 4096, 4096, XXH3, None, spec, spec)
    assert from_plain(ExpertEntry, to_plain(entry)) == entry and entry.spec("up") == spec
    with pytest.raises(KeyError):
        entry.spec("gate")


@pytest.mark.parametrize(
    ("layers", "has_paths"), [(ENCODER_LAYERS, False), ((*ENCODER_LAYERS, ENCODER_LAYERS[-1]), True)]
)
def test_a_path_needs_three_routed_layers_of_one_stack(layers: tuple[LayerSpec, ...], has_paths: bool) -> None:
    assert bool(why_no_paths(replace(WITH_ENCODER, layers=layers))) != has_paths


SPARSE = RouterSpec("sparsemixer", False, margin=0.02)
LONG = LongRopeSpec(16, (0.5, 0.25), 1.2)
UNIFORM = RouterSpec("uniform", False, static=StaticRouting((0, 2) * 50))


def static(router: RouterSpec) -> ModelSpec:
    """50 tokens, two layers of three experts, two of which are every token's."""
    layer = layer_spec()
    return model_spec([replace(layer, experts=replace(layer.experts, router=router))] * 2)


def whole() -> ModelSpec:
    """Layer norms, a bias of the head, sparsemixer and a long form."""
    layer = layer_spec()
    experts = replace(layer.experts, top_k=2, router=SPARSE)
    attention = replace(layer.attention, rope=RopeSpec(1e4, 4, frequencies=(1.0, 0.5), long=LONG))
    return replace(
        model_spec([replace(layer, attention=attention, experts=experts)] * 2), norm="layer", has_head_bias=True
    )


def test_every_norm_has_its_bias_behind_it() -> None:
    before, found = list(replace(whole(), norm="rms").dense_shapes()), list(whole().dense_shapes())
    biases = [name for name in found if name.endswith("norm_bias")]
    assert [name for name in found if name not in biases] == before
    assert len(biases) == 2 * 2 + 1 and all(found.index(name) == found.index(name[:-5]) + 1 for name in biases)
    assert {whole().dense_shapes()[name] for name in biases} == {(whole().hidden_size,)}
    assert found[-1] == "lm_head_bias" and whole().dense_shapes()["lm_head_bias"] == (whole().vocab_size,)


def test_a_run_has_the_original_context_unless_it_asks() -> None:
    assert whole().original_positions == 16 < whole().max_positions
    assert model_spec().original_positions == model_spec().max_positions


@pytest.mark.parametrize("model", [whole(), static(UNIFORM), WITH_ENCODER])
def test_they_come_back_from_a_manifest(model: ModelSpec) -> None:
    assert from_plain(ModelSpec, to_plain(model)) == model


def test_experts_that_weigh_alike_need_no_router() -> None:
    assert not [name for name in static(UNIFORM).dense_shapes() if "router" in name]
    assert "layers.0.router" in static(replace(UNIFORM, scoring="softmax")).dense_shapes()


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ((), {"norm": "rms"}), ((), {"has_head_bias": False}),
        (("layers", 0, "attention", "rope"), {"long": None}),
        (("layers", 0, "experts", "router"), {"margin": 0.0}),
        (("layers", 0, "experts", "router"), {"static": None}),
        (("layers", 0, "experts", "router"), {"capacity": 0}),
        (("layers", 0, "attention"), {"relative_bias": None}),
        (("layers", 0), {"cross": None}),
        ((), {"encoder": None}),
    ],
)  # fmt: skip
def test_other_manifests_have_no_such_field(path: tuple[Any, ...], default: dict[str, Any]) -> None:
    plain = to_plain(model_spec())
    place = plain
    for step in path:
        place = place[step]
    assert not set(default) & set(place)
    place.update(default)
    with pytest.raises(DecodeError, match="expected no field where it has its default"):
        from_plain(ModelSpec, plain)
    assert path or not set(default) & set(json_schema(ModelSpec)["required"])


def _in_encoder(routing: StaticRouting) -> ModelSpec:
    layers = list(WITH_ENCODER.layers)
    experts = layers[1].experts
    experts = replace(experts, top_k=2, router=replace(experts.router, capacity=0, static=routing))
    layers[1] = replace(layers[1], experts=experts)
    return replace(WITH_ENCODER, layers=tuple(layers))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: AttentionSpec(2, 2, 16, None, latent=LATENT), "latent attention needs a rotary embedding"),
        (lambda: RouterSpec("softmax", False, margin=0.1), "margin is for sparsemixer"),
        (lambda: replace(SPARSE, margin=-0.1), "margin out of range"),
        (lambda: replace(SPARSE, renormalize=True), "logits and margin only"),
        (lambda: replace(SPARSE, scale=2.0), "logits and margin only"),
        (lambda: replace(SPARSE, correction=(0.0,)), "logits and margin only"),
        (lambda: replace(SPARSE, has_bias=True), "logits and margin only"),
        (lambda: replace(SPARSE, capacity=3), "logits and margin only"),
        (lambda: ExpertsSpec(8, 1, 32, "silu", SPARSE), "sparsemixer chooses 2 experts, not 1"),
        (lambda: replace(LONG, original_positions=0), "original_positions out of range"),
        (lambda: replace(LONG, magnitude=0.0), "rope magnitude out of range"),
        (lambda: replace(LONG, frequencies=(0.5, 2.0)), "frequencies: expected numbers from 0 to 1"),
        (lambda: RopeSpec(1e4, 8, long=LONG), "long: expected rotary_size / 2 frequencies"),
        (lambda: RopeSpec(1e4, 8, frequencies=(0.5,)), "frequencies: expected rotary_size / 2 numbers"),
        (lambda: replace(WITH_ENCODER, norm="layer"), "a model with an encoder has RMS norms"),
        (lambda: replace(SPARSE, static=StaticRouting((0, 1))), "logits and margin only"),
        (lambda: replace(UNIFORM, static=None), "uniform is for static routing"),
        (lambda: replace(UNIFORM, renormalize=True), "uniform is for static routing"),
        (lambda: replace(UNIFORM, has_bias=True), "uniform is for static routing"),
        (lambda: replace(UNIFORM, capacity=2), "static routing has no correction, groups, capacity"),
        (lambda: replace(UNIFORM, groups=3), "static routing has no correction, groups, capacity"),
        (lambda: static(replace(UNIFORM, static=StaticRouting((0, 2) * 49))), "expected experts of 50 tokens"),
        (lambda: static(replace(UNIFORM, static=StaticRouting((0,) * 99))), "static: expected 2 per token"),
        (lambda: static(replace(UNIFORM, static=StaticRouting(()))), "static: expected 2 per token"),
        (lambda: static(replace(UNIFORM, static=StaticRouting((0, 3) * 50))), "static: expected experts from 0 to 2"),
        (lambda: static(replace(UNIFORM, static=StaticRouting((0, -1) * 50))), "static: expected experts from 0 to 2"),
        (lambda: static(replace(UNIFORM, static=StaticRouting((1, 1) * 50))), "a token names an expert twice"),
        (lambda: _in_encoder(StaticRouting((0, 1) * 50)), "layer 1: static routing is for decoders"),
        (lambda: replace(WITH_ENCODER, encoder=EncoderSpec(5, 0)), "leaves at least one layer"),
        (lambda: replace(WITH_ENCODER, encoder=EncoderSpec(0, 0)), "leaves at least one layer"),
        (lambda: replace(WITH_ENCODER, encoder=EncoderSpec(2, 50)), "start token"),
        (lambda: replace(WITH_ENCODER, encoder=EncoderSpec(3, 0)), "layer 2: cross"),
        (lambda: replace(WITH_ENCODER, encoder=None), "layer 1: capacity"),
        (lambda: with_layer(3, cross=None), "layer 3: cross"),
        (lambda: with_layer(3, experts=CAPPED), "layer 3: capacity"),
        (lambda: with_layer(1, attention=replace(SELF, relative_bias=None)), "layer 1: the layers of a stack"),
        (lambda: with_layer(0, attention=replace(SELF, sliding_window=4)), "layer 0: encoders"),
        (lambda: with_layer(1, attention=replace(SELF, num_heads=4)), "layer 1: layers that share a relative bias"),
        (lambda: with_layer(1, attention=replace(SELF, num_kv_heads=1)), "layer 1: the layers of an encoder have keys"),
        (lambda: with_layer(1, attention=replace(SELF, head_size=32)), "layer 1: the layers of an encoder have keys"),
        (lambda: with_layer(3, cross=SELF), "heads and a scale alone"),
        (lambda: with_layer(3, cross=replace(CROSS, rope=RopeSpec(1e4, 8))), "heads and a scale alone"),
        (lambda: RelativeBiasSpec(6, 20), "multiple of 4"),
        (lambda: RelativeBiasSpec(32, 16), "max_distance must exceed 16"),
        (lambda: replace(ROUTER, capacity=-1), "capacity out of range"),
        (lambda: replace(ROUTED, has_bias=True), "no biases"),
    ],
)
def test_contradictions(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()
