"""Operations that few models ask for: what they refuse, their shapes, and that other manifests know nothing of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moec.manifests.codec import DecodeError, from_plain, to_plain
from moec.manifests.model import ExpertsSpec, LongRopeSpec, ModelSpec, RopeSpec, RouterSpec
from tests.manifests.encoder_examples import MODEL as WITH_ENCODER
from tests.manifests.examples import layer_spec, model_spec

SPARSE = RouterSpec("sparsemixer", False, margin=0.02)
LONG = LongRopeSpec(16, (0.5, 0.25), 1.2)


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


def test_they_come_back_from_a_manifest() -> None:
    assert from_plain(ModelSpec, to_plain(whole())) == whole()


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ((), {"norm": "rms"}), ((), {"has_head_bias": False}),
        (("layers", 0, "attention", "rope"), {"long": None}),
        (("layers", 0, "experts", "router"), {"margin": 0.0}),
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


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: RouterSpec("softmax", False, margin=0.1), "margin is for sparsemixer"),
        (lambda: replace(SPARSE, margin=-0.1), "margin out of range"),
        (lambda: replace(SPARSE, renormalize=True), "logits and margin alone"),
        (lambda: replace(SPARSE, scale=2.0), "logits and margin alone"),
        (lambda: replace(SPARSE, correction=(0.0,)), "logits and margin alone"),
        (lambda: replace(SPARSE, has_bias=True), "logits and margin alone"),
        (lambda: replace(SPARSE, capacity=3), "logits and margin alone"),
        (lambda: ExpertsSpec(8, 1, 32, "silu", SPARSE), "sparsemixer chooses 2 experts, not 1"),
        (lambda: replace(LONG, original_positions=0), "original_positions out of range"),
        (lambda: replace(LONG, magnitude=0.0), "rope magnitude out of range"),
        (lambda: replace(LONG, frequencies=(0.5, 2.0)), "frequencies: expected numbers from 0 to 1"),
        (lambda: RopeSpec(1e4, 8, long=LONG), "long: expected rotary_size / 2 frequencies"),
        (lambda: RopeSpec(1e4, 8, frequencies=(0.5,)), "frequencies: expected rotary_size / 2 numbers"),
        (lambda: replace(WITH_ENCODER, norm="layer"), "a model with an encoder has RMS norms"),
    ],
)
def test_contradictions(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()
