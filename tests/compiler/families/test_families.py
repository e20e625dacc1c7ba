"""Lowering: config.json to ModelSpec, names on disk to units, and every setting is read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moec.cli.measuring.text_engines import bundle_engine
from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.preflight.preflight import preflight
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.evaluation.engine import GenerationRequest, in_order
from moec.manifests.errors import CheckpointError, ContextOverflow
from moec.manifests.model import PROJECTIONS, ModelSpec, RelativeBiasSpec, UnitKey
from moec.runtime.options.runtime import RuntimeOptions
from tests.compiler.lowered import configured, lowered, save_family
from tests.gates.bundles import emit_bundle
from tests.tiny_families import CHOSEN, TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TINY_MODELS, TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.oracle

OWN = ("deepseek-every-other", "minicpm")
MIXTRAL = "model.layers.{layer}.block_sparse_moe.experts.{expert}"
MLP = "model.layers.{layer}.mlp.experts.{expert}"
DISK_NAMES = {
    "mixtral": (MIXTRAL, ("w1", "w3", "w2"), {"layers.0.output": "model.layers.0.self_attn.o_proj.weight"}),
    "olmoe": (
        MLP, ("gate_proj", "up_proj", "down_proj"),
        {
            "layers.1.query_norm": "model.layers.1.self_attn.q_norm.weight",
            "layers.1.router": "model.layers.1.mlp.gate.weight",
        },
    ),
    "qwen3_moe": (
        MLP, ("gate_proj", "up_proj", "down_proj"), {"layers.1.key_norm": "model.layers.1.self_attn.k_norm.weight"},
    ),
    "phimoe": (
        MIXTRAL, ("w1", "w3", "w2"),
        {
            "layers.1.attention_norm_bias": "model.layers.1.input_layernorm.bias",
            "layers.1.experts_norm_bias": "model.layers.1.post_attention_layernorm.bias",
            "layers.0.output_bias": "model.layers.0.self_attn.o_proj.bias",
            "layers.0.router": "model.layers.0.block_sparse_moe.gate.weight",
            "final_norm_bias": "model.norm.bias", "lm_head_bias": "lm_head.bias",
        },
    ),
    "deepseek-every-other": (
        MLP, ("gate_proj", "up_proj", "down_proj"),
        {
            "layers.2.router": "model.layers.2.mlp.gate.weight",
            "layers.2.shared_up": "model.layers.2.mlp.shared_experts.up_proj.weight",
            "layers.1.shared_down": "model.layers.1.mlp.down_proj.weight",
        },
    ),
    "minicpm": (
        MLP, ("w1", "w3", "w2"),
        {"layers.2.router": "model.layers.2.mlp.gate.weight", "embedding": "model.embed_tokens.weight"},
    ),
    "minimax-m2": (
        "model.layers.{layer}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"),
        {"layers.1.router": "model.layers.1.block_sparse_moe.gate.weight"},
    ),
    "hy3": (
        MLP, ("gate_proj", "up_proj", "down_proj"),
        {
            "layers.1.router": "model.layers.1.mlp.router.gate.weight",
            "layers.2.shared_down": "model.layers.2.mlp.shared_mlp.down_proj.weight",
        },
    ),
    "switch": ("{place}.mlp.experts.expert_{expert}", ("", "wi", "wo"), {}),
}  # fmt: skip
"""Name of an expert on disk, those of its gate, up and down projection, and those of a few dense weights."""
SWITCH_PLACES = {
    1: "encoder.block.1.layer.1", 3: "encoder.block.3.layer.1", 5: "decoder.block.1.layer.2",
    7: "decoder.block.3.layer.2",
}  # fmt: skip


@pytest.mark.parametrize("family", DISK_NAMES)
def test_every_tensor_is_read_under_its_name(family: str, saved: Callable[[str], Path]) -> None:
    lowering, on_disk = lowered(saved(family)), load_file(saved(family) / WEIGHTS_NAME)
    expert, projections, dense = DISK_NAMES[family]
    for key in lowering.units:
        name = expert.format(layer=key.layer, expert=key.expert, place=SWITCH_PLACES.get(key.layer))
        projection = dict(zip(PROJECTIONS, projections, strict=True))[key.projection]
        assert torch.equal(lowering.unit(key), on_disk[f"{name}.{projection}.weight"]), key
    for name, own in dense.items():
        assert torch.equal(lowering.dense_weight(name), on_disk[own]), name
    for name, shape in lowering.model.dense_shapes().items():
        assert lowering.dense_weight(name).shape == shape
    assert {source.name for source in (*lowering.dense.values(), *lowering.units.values())} == set(
        on_disk
    ) - lowering.auxiliary


def test_olmoe_is_what_its_configuration_says(saved: Callable[[str], Path]) -> None:
    model = lowered(saved("olmoe")).model
    layer = model.layers[1]
    assert (model.family, layer.attention.query_key_norm) == ("olmoe", "full")
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (5, 2, 96)
    assert not layer.experts.router.renormalize
    assert model.dense_shapes()["layers.0.query_norm"] == (64,)
    assert model.dense_shapes()["layers.0.key_norm"] == (32,)


def test_qwen3_moe_is_what_its_configuration_says(saved: Callable[[str], Path]) -> None:
    model = lowered(saved("qwen3_moe")).model
    layer = model.layers[1]
    assert (model.family, layer.attention.query_key_norm, layer.attention.head_size) == ("qwen3_moe", "head", 32)
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (5, 2, 96)
    assert not layer.experts.router.renormalize and layer.attention.sliding_window == 0
    assert model.dense_shapes()["layers.0.query_norm"] == model.dense_shapes()["layers.0.key_norm"] == (32,)
    assert model.dense_shapes()["layers.0.query"] == (4 * 32, 64)


def test_phimoe_is_what_its_configuration_says(saved: Callable[[str], Path]) -> None:
    model = lowered(saved("phimoe")).model
    layer = model.layers[1]
    assert (model.family, model.norm, model.has_head_bias, model.max_positions) == ("phimoe", "layer", True, 256)
    assert (layer.experts.router.scoring, layer.experts.router.margin) == ("sparsemixer", 0.4)
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (6, 2, 96)
    assert (layer.attention.bias, layer.attention.sliding_window, layer.attention.num_kv_heads) == ("all", 0, 2)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_model_is_what_the_configuration_says(name: str, tmp_path: Path) -> None:
    tiny = TINY_MODELS[name]
    lowering = lowered(save_tiny_mixtral(tmp_path / name, tiny))
    model, layer = lowering.model, lowering.model.layers[0]
    assert (model.family, model.hidden_size, model.num_layers) == ("mixtral", tiny.hidden_size, tiny.layers)
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (tiny.experts, tiny.top_k, tiny.width)
    assert layer.experts.router.renormalize and layer.experts.router.scoring == "softmax"
    assert (layer.attention.num_heads, layer.attention.num_kv_heads) == (tiny.heads, tiny.kv_heads)
    assert layer.attention.head_size == (tiny.head_size or tiny.hidden_size // tiny.heads)
    assert layer.attention.sliding_window == (tiny.sliding_window or 0)
    assert layer.attention.rope.theta == 10_000.0
    assert (model.tie_embeddings, model.eos_token_ids, model.max_positions) == (tiny.tied, (2,), 128)
    assert lowering.float_type == tiny.dtype
    assert not lowering.notes


ROUTERS = {
    "mixtral": (".block_sparse_moe.gate.", ".mlp.gate."), "phimoe": (".block_sparse_moe.gate.", ".mlp.router."),
    "hy3": (".mlp.router.gate.", ".mlp.gate."), "minimax-m2": (".block_sparse_moe.gate.", ".mlp.gate."),
}  # fmt: skip
"""Names of routers on disk and in transformers' model, where they differ."""


# For each family with one tensor per expert on disk: the stacks that transformers' model holds.
@pytest.mark.parametrize(
    "name",
    [
        *ROUTERS, "qwen2", "qwen3-plain-first", "deepseek-v2", "deepseek-v3", "glm4", "ernie", "granite", "glm4-lite",
        "solar", "sarvam-moe", "dots1", "exaone", "mellum", "flint", "granite-shared",
    ],
)  # fmt: skip
def test_weights_as_transformers_holds_them_give_the_same_units(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    before, path = lowered(saved(name)), Path(shutil.copytree(saved(name), tmp_path / "tiny"))
    model, (old, new) = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), ROUTERS.get(name, ("", ""))
    read = {source.name for source in before.dense.values()} | before.ignored | before.auxiliary
    kept = {key.replace(old, new): tensor for key, tensor in load_file(path / WEIGHTS_NAME).items() if key in read}
    fused = {key: tensor.clone() for key, tensor in model.state_dict().items() if "_proj" in key and ".experts." in key}
    assert fused
    save_file(kept | fused, path / WEIGHTS_NAME)
    after = lowered(path)
    assert {source.name for source in after.units.values()} == set(fused)
    assert after.model == before.model
    assert all(torch.equal(after.unit(key), before.unit(key)) for key in before.units)
    assert all(torch.equal(after.dense_weight(key), before.dense_weight(key)) for key in before.dense)


def test_corrections_are_kept_exactly(tmp_path: Path) -> None:
    path = save_tiny_family(tmp_path / "tiny", TINY_FAMILIES["deepseek-v3"])
    on_disk = load_file(path / WEIGHTS_NAME)
    model = lowered(path).model
    for layer in model.expert_layers:
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert on_disk[name].dtype == torch.float32
        assert list(model.layers[layer].experts.router.correction) == on_disk[name].tolist()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(on_disk | {name: on_disk[name][:-1].clone()}, path / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=f"tensor `{name}` .*: expected 8 finite numbers"):
        lowered(path)
    del on_disk[name]
    save_file(on_disk, path / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=f"has no tensor `{name}`"):
        lowered(path)


def test_float32_is_rounded_to_bfloat16_and_said(tmp_path: Path) -> None:
    path = save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(dtype="float32"))
    lowering = lowered(path)
    assert lowering.float_type == "bfloat16"
    assert len(lowering.notes) == 1 and "are rounded to bfloat16" in lowering.notes[0]
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    expected = load_file(path / WEIGHTS_NAME)[name].bfloat16()
    assert torch.equal(lowering.unit(UnitKey(0, 0, "gate")), expected)


def test_mixed_sixteen_bit_types_are_refused(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS_NAME)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=r"mixes bfloat16 \(.*\) and float16 \(`model.norm.weight`\)"):
        lowered(copy)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_checkpoint_with_an_output_matrix(copy: Path, equal: bool) -> None:
    tensors = load_file(copy / WEIGHTS_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if equal else 2)
    save_file(tensors, copy / WEIGHTS_NAME)
    assert lowered(configured(copy, tie_word_embeddings=True)).model.tie_embeddings is equal


def test_deepseek_is_what_its_configuration_says(saved: Callable[[str], Path]) -> None:
    model = lowered(saved("deepseek")).model
    plain, routed = model.layers[:2]
    assert lowered(saved("deepseek-every-other")).model.expert_layers == (2, 4)
    assert (model.family, model.expert_layers, model.tie_embeddings) == ("deepseek", (1, 2), False)
    assert (routed.experts.count, routed.experts.top_k, routed.experts.width) == (8, 4, 64)
    assert routed.shared is not None and (routed.shared.width, routed.shared.has_gate) == (128, False)
    assert plain.shared is not None and plain.shared.width == 96
    assert (routed.experts.router.scoring, routed.experts.router.renormalize) == ("softmax", False)
    one = lowered(saved("deepseek-top1-half")).model
    # The published code divides by the sum only if it chooses more than one expert.
    assert not one.layers[0].experts.router.renormalize and one.layers[0].shared is None
    assert one.layers[0].attention.rope == model.layers[0].attention.rope, "10,000 is the base that is not said"


def test_minicpm_is_what_its_configuration_says(saved: Callable[[str], Path]) -> None:
    model = lowered(saved("minicpm")).model
    assert (model.family, model.tie_embeddings, model.embedding_scale) == ("minicpm", True, 12)
    assert (model.residual_scale, model.logits_scale) == (pytest.approx(1.4 / math.sqrt(3)), 16 / 64)
    experts = model.layers[0].experts
    assert (experts.count, experts.top_k, experts.width, experts.router.renormalize) == (6, 2, 96, True)


def test_switch_is_what_the_configuration_says(saved: Callable[[str], Path]) -> None:
    model = lowered(saved("switch-capacity")).model
    assert (model.family, model.num_layers, model.first_decoder_layer) == ("switch_transformers", 8, 3)
    assert model.expert_layers == (1, 3, 4, 5, 6, 7) and model.tie_embeddings and model.logits_scale == 64**-0.5
    routers = [model.layers[layer].experts.router for layer in model.expert_layers]
    assert [router.capacity for router in routers] == [6, 0, 0, 0, 0, 0]
    assert all(router.has_bias and not router.renormalize for router in routers)
    attention = model.layers[0].attention
    assert (attention.num_heads, attention.head_size, attention.score_scale) == (3, 32, 1.0)
    assert attention.relative_bias == RelativeBiasSpec(32, 128) and attention.rope is None
    assert model.max_positions == 512 and model.eos_token_ids == (2,)
    untied = lowered(saved("switch-all-routed-half")).model
    assert not untied.tie_embeddings and untied.logits_scale == 1.0 and untied.expert_layers == (0, 1, 2, 3, 4)


def test_older_switch_checkpoints_hold_copies_of_the_embedding(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """They also hold a table that no release of transformers reads. A copy that differs is refused."""
    plain = saved("switch")
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    tensors = load_file(plain / WEIGHTS_NAME)
    shared = tensors["shared.weight"]
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {name: shared.clone() for name in names}
    save_file({**tensors, **copies, unread: torch.ones(32, 4)}, copy / WEIGHTS_NAME)
    lowering = lowered(copy)
    assert lowering.model == lowered(plain).model and lowering.ignored == {*names, unread}
    save_file({**tensors, "encoder.embed_tokens.weight": shared + 1}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=r"`encoder.embed_tokens.weight` .* differs from `shared.weight`"):
        lowered(copy)
    save_file({**tensors, "lm_head.weight": shared + 1}, copy / WEIGHTS_NAME)
    model = lowered(copy).model
    assert not model.tie_embeddings and model.logits_scale == 64**-0.5  # the key decides the scale, not the weights


def test_both_rotary_forms_of_phimoe_are_what_transformers_computes(saved: Callable[[str], Path]) -> None:
    folder = saved("phimoe")
    rope = lowered(folder).model.layers[0].attention.rope
    assert rope is not None and rope.long is not None and rope.long.original_positions == 128
    config, make = AutoConfig.from_pretrained(folder), ROPE_INIT_FUNCTIONS["longrope"]
    assert list(rope.frequencies) == make(config, seq_len=128)[0].tolist()
    assert list(rope.long.frequencies) == make(config, seq_len=129)[0].tolist()
    assert rope.frequencies != rope.long.frequencies
    assert (rope.magnitude, rope.long.magnitude) == (1.1, 1.3)


def test_evaluations_stay_within_the_original_context(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Beyond it, transformers rotates in another way than the runtime."""
    with bundle_engine(emit_bundle(saved("phimoe"), tmp_path / "bundle"), RuntimeOptions()) as engine:
        assert len(engine.forced_logits([([5] * 64, [6] * 63)])) == 1
        with pytest.raises(ContextOverflow, match="expected 1 to 127"):
            in_order(engine.generate, [GenerationRequest("p" * 200, None, 1)])


def test_minicpm_ties_every_output_matrix(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The published code ties every output matrix. An equal one is left out, a different one is an error."""
    copy = Path(shutil.copytree(saved("minicpm"), tmp_path / "copy"))
    tensors = load_file(copy / WEIGHTS_NAME)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, copy / WEIGHTS_NAME)
    assert lowered(copy).model.tie_embeddings and "lm_head.weight" in lowered(copy).ignored
    save_file(tensors | {"lm_head.weight": embedding * 2}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=r"key `tie_word_embeddings`: expected false, because `lm_head\.weight`"):
        lowered(copy)


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_weight_that_is_missing_or_has_another_shape_is_named(
    family: str, is_missing: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(saved(family), tmp_path / "copy"))
    tensors, name = load_file(copy / WEIGHTS_NAME), "model.layers.2.mlp.gate.weight"
    other = tensors.pop(name)
    save_file(tensors if is_missing else tensors | {name: other[:-1].clone()}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=f"{'missing' if is_missing else 'misshapen'} tensor `{name}`"):
        preflight(lowered(copy))


@pytest.mark.parametrize("family", OWN)
def test_code_of_a_checkpoint_is_never_run(family: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """config.json names Python files that are next to it on the hub."""
    copy = Path(shutil.copytree(saved(family), tmp_path / "copy"))
    named = set(json.loads((copy / "config.json").read_text())["auto_map"].values())
    for place in named:
        (copy / f"{place.partition('.')[0]}.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    assert named and LoadedLayer(lowered(copy)).single.model.__module__.startswith("transformers.")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_name_their_tensor(copy: Path, value: float) -> None:
    tensors, name = load_file(copy / WEIGHTS_NAME), "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors[name][3, 4] = tensors["model.embed_tokens.weight"][3, 5] = value
    save_file(tensors, copy / WEIGHTS_NAME)
    lowering = lowered(copy)
    lowering.unit(UnitKey(1, 1, "down"))
    with pytest.raises(CheckpointError, match=f"tensor `{name}` in .* holds NaN or infinite values"):
        lowering.unit(UnitKey(1, 2, "down"))
    with pytest.raises(CheckpointError, match=r"tensor `model.embed_tokens.weight` in .* holds NaN or infinite values"):
        lowering.dense_weight("embedding")


@pytest.mark.parametrize("family", sorted(set(CHOSEN) - {"deepseek", "minicpm"}))
def test_an_absent_key_has_the_default_of_transformers(tmp_path: Path, family: str) -> None:
    """Each key is left out in turn. Then the model is the one of the written default, or config.json is refused."""
    path = save_family(CHOSEN[family], tmp_path / "model")
    whole = json.loads((path / "config.json").read_text())
    kind = type(AutoConfig.from_pretrained(path))
    for key in whole.keys() - {"model_type", "architectures", "dtype", "transformers_version"}:
        rest = {name: value for name, value in whole.items() if name != key}
        model = model_of_tensors(path, rest)
        if model is not None:
            written = model_of_tensors(path, json.loads(json.dumps(kind.from_dict(rest).to_dict(), default=str)))
            assert written in (model, None), key


def model_of_tensors(path: Path, config: dict[str, object]) -> ModelSpec | None:
    """Return the model of another config.json; None if it is refused, or if the tensors have other shapes."""
    (path / "config.json").write_text(json.dumps(config))
    try:
        lowering = lowered(path)
    except CheckpointError:
        return None
    sources = (*lowering.dense.values(), *lowering.units.values())
    tensors = lowering.checkpoint.tensors
    fits = all(source.name in tensors and tensors[source.name].shape == tuple(source.shape) for source in sources)
    return lowering.model if fits else None
