"""Lowering of Phi-3.5-MoE: names, settings, and both forms of its rotary embedding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moec.cli.measuring.text_engines import bundle_engine
from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.evaluation.engine import GenerationRequest, no_progress
from moec.manifests.errors import CheckpointError, ContextOverflow
from moec.runtime.options.runtime import RuntimeOptions
from tests.compiler.lowered import configured, lowered
from tests.gates.bundles import emit_bundle
from tests.tiny_families import LONGROPE, TINY_FAMILIES, TinyFamily, save_tiny_family

pytestmark = pytest.mark.oracle

ORIGINAL = {"original_max_position_embeddings": 128}
# The form on the hub: the older name `type`, and the original context outside too.
OLD = {key: value for key, value in LONGROPE.items() if key not in ("rope_type", "rope_theta")} | {"type": "longrope"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_family(tmp_path_factory.mktemp("phimoe") / "tiny", TINY_FAMILIES["phimoe"])


def test_it_is_what_its_configuration_says(folder: Path) -> None:
    lowering, on_disk = lowered(folder), load_file(folder / WEIGHTS_NAME)
    model, layer = lowering.model, lowering.model.layers[1]
    assert (model.family, model.norm, model.has_head_bias, model.max_positions) == ("phimoe", "layer", True, 256)
    assert (layer.experts.router.scoring, layer.experts.router.margin) == ("sparsemixer", 0.4)
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (6, 2, 96)
    assert (layer.attention.bias, layer.attention.sliding_window, layer.attention.num_kv_heads) == ("all", 0, 2)
    names = {
        "layers.1.attention_norm_bias": "model.layers.1.input_layernorm.bias",
        "layers.1.experts_norm_bias": "model.layers.1.post_attention_layernorm.bias",
        "layers.0.output_bias": "model.layers.0.self_attn.o_proj.bias",
        "layers.0.router": "model.layers.0.block_sparse_moe.gate.weight",
        "final_norm_bias": "model.norm.bias", "lm_head_bias": "lm_head.bias",
    }  # fmt: skip
    for name, own in names.items():
        assert torch.equal(lowering.dense_weight(name), on_disk[own]), name
    disk = {"gate": "w1", "up": "w3", "down": "w2"}
    for key in lowering.units:
        name = f"model.layers.{key.layer}.block_sparse_moe.experts.{key.expert}.{disk[key.projection]}.weight"
        assert torch.equal(lowering.unit(key), on_disk[name])
    read = {source.name for source in (*lowering.dense.values(), *lowering.units.values())}
    assert read == set(on_disk), "every tensor is read"


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    path = save_tiny_family(tmp_path / "tiny", TinyFamily("Phimoe", {"num_local_experts": 4}))
    absent = ("router_jitter_noise", "attention_bias", "lm_head_bias", "sliding_window", "input_jitter_noise")
    model = lowered(configured(path, **dict.fromkeys(absent, ...))).model
    config = AutoConfig.from_pretrained(path)
    assert model.layers[0].experts.router.margin == 2 * config.router_jitter_noise
    assert (model.layers[0].attention.bias == "all", model.has_head_bias) == (
        config.attention_bias,
        config.lm_head_bias,
    )
    assert model.layers[0].attention.sliding_window == 0 and config.sliding_window is None


def test_the_router_as_transformers_holds_it(folder: Path, copy: Path) -> None:
    tensors, old, new = load_file(folder / WEIGHTS_NAME), ".block_sparse_moe.gate.", ".mlp.router."
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, copy / WEIGHTS_NAME)
    before, after = lowered(folder), lowered(copy)
    assert after.model == before.model and after.dense["layers.0.router"].name == "model.layers.0.mlp.router.weight"
    assert torch.equal(after.dense_weight("layers.0.router"), before.dense_weight("layers.0.router"))


def test_both_forms_are_what_transformers_computes(folder: Path) -> None:
    rope = lowered(folder).model.layers[0].attention.rope
    assert rope is not None and rope.long is not None and rope.long.original_positions == 128
    config, make = AutoConfig.from_pretrained(folder), ROPE_INIT_FUNCTIONS["longrope"]
    assert list(rope.frequencies) == make(config, seq_len=128)[0].tolist()
    assert list(rope.long.frequencies) == make(config, seq_len=129)[0].tolist()
    assert rope.frequencies != rope.long.frequencies
    assert (rope.magnitude, rope.long.magnitude) == (1.1, 1.3)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ..., "rope_scaling": OLD, "rope_theta": 10_000.0},
        {"rope_parameters": ..., "rope_scaling": {**OLD, **ORIGINAL}, "rope_theta": 10_000.0},
        {"rope_parameters": {**LONGROPE, **ORIGINAL, "factor": 2.0}},
        {"auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"}, "hidden_dropout": 0.0},
        {"input_jitter_noise": 0.01, "rope_parameters": {**LONGROPE, **ORIGINAL}, "rope_scaling": {**LONGROPE}},
    ],
)
def test_the_same_in_other_words(folder: Path, copy: Path, changes: dict[str, Any]) -> None:
    assert lowered(configured(copy, **changes)).model == lowered(folder).model


def test_without_longer_contexts_there_is_no_long_form(copy: Path) -> None:
    model = lowered(configured(copy, max_position_embeddings=128)).model
    rope = model.layers[0].attention.rope
    assert rope is not None and rope.long is None and rope.magnitude == 1.1
    assert model.original_positions == model.max_positions == 128


def _longrope(**changes: Any) -> dict[str, Any]:
    found = {**LONGROPE, **ORIGINAL, **changes}
    return {"rope_parameters": {key: value for key, value in found.items() if value is not ...}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 1}, "key `num_experts_per_tok`: expected 2"),
        ({"num_experts_per_tok": ...}, "key `num_experts_per_tok`: expected a whole number"),
        ({"num_local_experts": 1}, "contradicts itself: top_k must be 1 to 1, found 2"),
        ({"router_jitter_noise": -0.1}, "key `router_jitter_noise`: expected a number from 0"),
        ({"router_jitter_noise": "0.1"}, "key `router_jitter_noise`: expected a number from 0"),
        ({"lm_head_bias": 1}, "key `lm_head_bias`: expected true or false"),
        ({"attention_bias": "yes"}, "key `attention_bias`: expected true or false"),
        ({"sliding_window": -3}, "key `sliding_window`: expected a whole number"),
        ({"layer_types": ["full_attention"] * 3}, "unknown: layer_types"),
        (_longrope(short_factor=[1.0] * 7), "expected 8 positive numbers as `short_factor`"),
        (_longrope(long_factor=[1.0] * 7 + [0]), "expected 8 positive numbers as `long_factor`"),
        (_longrope(long_factor=...), "expected 8 positive numbers as `long_factor`"),
        (_longrope(short_mscale=...), "expected a positive number as `short_mscale`"),
        (_longrope(long_mscale="1"), "expected a positive number as `long_mscale`"),
        (_longrope(factor=4.0), "expected `factor` to be max_position_embeddings / 128"),
        (_longrope(attention_factor=1.2), "a rotary embedding without `attention_factor`"),
        (_longrope(partial_rotary_factor=0.5), "a rotary embedding without `partial_rotary_factor`"),
        (_longrope(original_max_position_embeddings=0), "as `original_max_position_embeddings`"),
        ({"original_max_position_embeddings": 64}, "key `original_max_position_embeddings`: expected the 128"),
        (_longrope(short_factor=[0.5] * 8), "contradicts itself: frequencies: expected numbers from 0 to 1"),
        ({"rope_scaling": {**OLD, "long_mscale": 1.0}}, "key `rope_parameters`: expected the same `long_mscale`"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "key `rope_parameters`: expected rope type `default` or `longrope`",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "key `rope_parameters`: expected rope type `default` or `longrope`, over whole heads",
        ),
    ],
)
def test_settings_that_cannot_be_expressed_are_named(copy: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        lowered(configured(copy, **changes))


def test_evaluations_stay_within_the_original_context(folder: Path, tmp_path: Path) -> None:
    """Beyond it, transformers rotates in another way than the runtime."""
    with bundle_engine(emit_bundle(folder, tmp_path / "bundle"), RuntimeOptions()) as engine:
        assert len(engine.forced_logits([([5] * 64, [6] * 63)])) == 1
        with pytest.raises(ContextOverflow, match="expected 1 to 127"):
            engine.generate([GenerationRequest("p" * 200, None, 1)], no_progress)


def test_a_configuration_that_transformers_refuses_is_a_checkpoint_error(copy: Path) -> None:
    """Its classes check their own keys, and raise an exception of transformers."""
    with pytest.raises(
        CheckpointError, match=r"transformers cannot build a layer of the model: .*output_router_logits"
    ):
        LoadedLayer(lowered(configured(copy, output_router_logits="perhaps")))
