"""Operations that few models ask for: what they refuse, their shapes, and that other manifests know nothing of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moec.manifests.codec import DecodeError, from_plain, to_plain
from moec.manifests.model import ExpertsSpec, LongRopeSpec, ModelSpec, RopeSpec, RouterSpec, StaticRouting
from tests.manifests.encoder_examples import MODEL as WITH_ENCODER
from tests.manifests.examples import layer_spec, model_spec

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


@pytest.mark.parametrize("model", [whole(), static(UNIFORM)])
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


def _in_encoder(routing: StaticRouting) -> ModelSpec:
    layers = list(WITH_ENCODER.layers)
    experts = layers[1].experts
    experts = replace(experts, top_k=2, router=replace(experts.router, capacity=0, static=routing))
    layers[1] = replace(layers[1], experts=experts)
    return replace(WITH_ENCODER, layers=tuple(layers))


@pytest.mark.parametrize(
    ("build", "said"),
    [
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
    ],
)
def test_contradictions(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()
