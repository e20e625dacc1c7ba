"""Models with an encoder: what they refuse, their shapes, and that all other manifests know nothing of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moec.manifests.bundle import ExpertEntry
from moec.manifests.codec import DecodeError, from_plain, json_schema, to_plain
from moec.manifests.model import EncoderSpec, LayerSpec, ModelSpec, RelativeBiasSpec, RopeSpec, UnitKey
from moec.manifests.path_tables import why_no_paths
from moec.manifests.quant import QuantSpec
from tests.manifests.encoder_examples import CAPPED, CROSS, LAYERS, MODEL, ROUTED, ROUTER, SELF
from tests.manifests.examples import XXH3, model_spec


def with_layer(index: int, **changes: Any) -> ModelSpec:
    layers = list(LAYERS)
    layers[index] = replace(layers[index], **changes)
    return replace(MODEL, layers=tuple(layers))


def test_shapes() -> None:
    shapes = MODEL.dense_shapes()
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
    assert MODEL.unit_keys()[:3] == (UnitKey(1, 0, "up"), UnitKey(1, 0, "down"), UnitKey(1, 1, "up"))
    # One pair for all layers of the encoder, one for each of the decoder, and one for what each sees of the encoder.
    assert MODEL.kv_bytes_per_position == (1 + 3 + 3) * 2 * 4 * 2 * 16


def test_the_layer_that_runs_next() -> None:
    assert [MODEL.layer_after(layer) for layer in range(5)] == [1, 2, 3, 4, 2]
    assert MODEL.layer_after(4, 3) == MODEL.layer_after(3, 1) == 4
    plain = model_spec()
    assert [plain.layer_after(0, ahead) for ahead in (1, 2, 3)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: replace(MODEL, encoder=EncoderSpec(5, 0)), "leaves at least one layer"),
        (lambda: replace(MODEL, encoder=EncoderSpec(0, 0)), "leaves at least one layer"),
        (lambda: replace(MODEL, encoder=EncoderSpec(2, 50)), "start token"),
        (lambda: replace(MODEL, encoder=EncoderSpec(3, 0)), "layer 2: cross"),
        (lambda: replace(MODEL, encoder=None), "layer 1: capacity"),
        (lambda: with_layer(3, cross=None), "layer 3: cross"),
        (lambda: with_layer(3, experts=CAPPED), "layer 3: capacity"),
        (lambda: with_layer(1, attention=replace(SELF, relative_bias=None)), "layer 1: the layers of a stack"),
        (lambda: with_layer(0, attention=replace(SELF, sliding_window=4)), "layer 0: encoders"),
        (
            lambda: with_layer(1, attention=replace(SELF, num_heads=4)),
            "layer 1: layers that share a relative bias have as many heads",
        ),
        (
            lambda: with_layer(1, attention=replace(SELF, num_kv_heads=1)),
            "layer 1: the layers of an encoder have keys and values of one size",
        ),
        (
            lambda: with_layer(1, attention=replace(SELF, head_size=32)),
            "layer 1: the layers of an encoder have keys and values of one size",
        ),
        (lambda: with_layer(3, cross=SELF), "heads and a scale alone"),
        (lambda: with_layer(3, cross=replace(CROSS, rope=RopeSpec(1e4, 8))), "heads and a scale alone"),
        (lambda: RelativeBiasSpec(6, 20), "multiple of 4"),
        (lambda: RelativeBiasSpec(32, 16), "max_distance must exceed 16"),
        (lambda: replace(ROUTER, capacity=-1), "capacity out of range"),
        (lambda: replace(ROUTED, has_bias=True), "no biases"),
    ],
)  # fmt: skip
def test_contradictions(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


def test_a_manifest_without_an_encoder_has_no_such_field() -> None:
    plain = to_plain(model_spec())
    assert "encoder" not in plain
    assert {"cross", "relative_bias", "capacity"}.isdisjoint(
        [*plain["layers"][0], *plain["layers"][0]["attention"], *plain["layers"][0]["experts"]["router"]]
    )
    with pytest.raises(DecodeError, match="field `encoder`: expected no field where it has its default"):
        from_plain(ModelSpec, {**plain, "encoder": None})
    assert "encoder" not in json_schema(ModelSpec)["required"]


def test_an_encoder_comes_back_from_a_manifest() -> None:
    assert from_plain(ModelSpec, to_plain(MODEL)) == MODEL


def test_an_expert_without_a_gate() -> None:
    spec = QuantSpec.parse("q4g32")
    entry = ExpertEntry(1, 0, "experts-00001.safetensors", 4096, 4096, XXH3, None, spec, spec)
    assert from_plain(ExpertEntry, to_plain(entry)) == entry and entry.spec("up") == spec
    with pytest.raises(KeyError):
        entry.spec("gate")


@pytest.mark.parametrize(("layers", "has_paths"), [(LAYERS, False), ((*LAYERS, LAYERS[-1]), True)])
def test_a_path_needs_three_routed_layers_of_one_stack(layers: tuple[LayerSpec, ...], has_paths: bool) -> None:
    assert bool(why_no_paths(replace(MODEL, layers=layers))) != has_paths
