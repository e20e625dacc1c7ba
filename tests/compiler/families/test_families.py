"""Lowering: config.json to ModelSpec, names on disk to units, and every setting is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.model import UnitKey
from tests.compiler.lowered import configured, lowered
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TINY_MODELS, TinyMixtral, save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe

pytestmark = pytest.mark.oracle

DISK_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


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


def test_units_and_dense_weights_are_the_tensors_on_disk(folder: Path) -> None:
    lowering, on_disk = lowered(folder), load_file(folder / WEIGHTS_NAME)
    for key in lowering.units:
        name = f"model.layers.{key.layer}.block_sparse_moe.experts.{key.expert}.{DISK_NAMES[key.projection]}.weight"
        assert torch.equal(lowering.unit(key), on_disk[name])
    for name, shape in lowering.model.dense_shapes().items():
        assert lowering.dense_weight(name).shape == shape
    assert torch.equal(lowering.dense_weight("layers.1.router"), on_disk["model.layers.1.block_sparse_moe.gate.weight"])
    assert torch.equal(lowering.dense_weight("layers.0.output"), on_disk["model.layers.0.self_attn.o_proj.weight"])


def test_stacked_experts_give_the_same_units(folder: Path, copy: Path) -> None:
    tensors, stacked = load_file(folder / WEIGHTS_NAME), {}
    for layer in range(2):
        block = f"model.layers.{layer}.block_sparse_moe."
        w1, w2, w3 = (torch.stack([tensors.pop(f"{block}experts.{e}.{w}.weight") for e in range(4)]) for w in
                      ("w1", "w2", "w3"))  # fmt: skip
        stacked[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        stacked[f"model.layers.{layer}.mlp.experts.down_proj"] = w2
        stacked[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(f"{block}gate.weight")
    save_file(tensors | stacked, copy / WEIGHTS_NAME)
    one, other = lowered(folder), lowered(copy)
    assert one.model == other.model
    for key in one.units:
        assert torch.equal(one.unit(key), other.unit(key)), key
    for name in one.dense:
        assert torch.equal(one.dense_weight(name), other.dense_weight(name)), name


# For each family with one tensor per expert on disk: the stacks that transformers' model holds.
@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3-plain-first", "deepseek-v2", "deepseek-v3", "glm4", "ernie", "granite", "phimoe"]
)
def test_experts_as_transformers_holds_them_give_the_same_units(name: str, tmp_path: Path) -> None:
    path = save_tiny_family(tmp_path / "tiny", TINY_FAMILIES[name])
    before = lowered(path)
    own = {key: before.unit(key) for key in before.units}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    read = {source.name for source in before.dense.values()} | before.ignored | before.auxiliary
    kept = {key: tensor for key, tensor in load_file(path / WEIGHTS_NAME).items() if key in read}
    fused = {key: tensor.clone() for key, tensor in model.state_dict().items() if "_proj" in key and ".experts." in key}
    assert fused
    save_file(kept | fused, path / WEIGHTS_NAME)
    after = lowered(path)
    assert {source.name for source in after.units.values()} == set(fused)
    assert after.model == before.model
    assert all(torch.equal(after.unit(key), weight) for key, weight in own.items())


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "key `topk_method`: expected one of `greedy`"),
        ("deepseek-v2", {"norm_topk_prob": True}, "key `norm_topk_prob`: expected false"),
        ("deepseek-v2", {"first_k_dense_replace": 3}, "key `first_k_dense_replace`: expected fewer layers than the 3"),
        ("deepseek-v2", {"kv_lora_rank": 40}, "contradicts itself: rank must be a multiple of 16"),
        ("deepseek-v2", {"moe_layer_freq": 2}, "key `moe_layer_freq`: expected `1`"),
        ("deepseek-v3", {"n_group": 3}, "contradicts itself: 3 groups must divide 8 experts"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "key `scoring_func`: expected `sigmoid`"),
        (
            "glm4",
            {"partial_rotary_factor": 2, "rope_parameters": ..., "rope_theta": 1e4},
            "key `partial_rotary_factor`",
        ),
        ("ernie", {"use_bias": True}, "key `use_bias`: expected false"),
        ("ernie", {"moe_layer_start_index": -5}, "key `moe_layer_start_index`: expected a layer"),
        ("granite", {"logits_scaling": 0}, "key `logits_scaling`: expected a positive number"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "key `layer_types`"),
        ("qwen2", {"shared_expert_intermediate_size": 0}, "key `shared_expert_intermediate_size`: expected a whole"),
    ],
)
def test_settings_of_further_families_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_tiny_family(tmp_path / "tiny", TINY_FAMILIES[name])
    with pytest.raises(CheckpointError, match=re.escape(message)):
        lowered(configured(path, **changes))


def test_an_unknown_family_is_refused_by_name(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model family `dbrx` is unknown, expected one of .*`mixtral`"):
        lowered(configured(copy, model_type="dbrx"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "key `hidden_act`: expected one of `silu`, found `gelu`"),
        ({"num_local_experts": ...}, "key `num_local_experts`: expected a whole number .* found nothing"),
        ({"num_local_experts": 10**9}, "key `num_local_experts`: expected a whole number from 1 to"),
        ({"num_hidden_layers": 10**12}, "key `num_hidden_layers`: expected a whole number from 1 to"),
        ({"hidden_size": "64"}, "key `hidden_size`: expected a whole number"),
        ({"rms_norm_eps": 0}, "key `rms_norm_eps`: expected a positive number"),
        ({"tie_word_embeddings": 1}, "key `tie_word_embeddings`: expected true or false"),
        ({"num_experts_per_tok": 5}, "contradicts itself: top_k must be 1 to 4, found 5"),
        ({"num_key_value_heads": 3}, "contradicts itself: num_kv_heads 3 must divide num_heads 4"),
        ({"num_attention_heads": 5}, "key `num_attention_heads`: expected a divisor of hidden_size 64"),
        ({"eos_token_id": 999, "vocab_size": 288}, None),
        ({"rope_parameters": ...}, "key `rope_theta`: expected a positive number, found nothing"),
        ({"rope_theta": 5.0}, "key `rope_theta`: expected the 10000.0 of `rope_parameters`, found `5.0`"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "key `rope_parameters`: expected rope type"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "key `rope_scaling`: expected rope type `default`"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2}}, "embedding without `factor`"),
        ({"attention_bias": True}, "key `attention_bias`: expected `False`, found `True`"),
        ({"logit_cap": 30}, r"key `logit_cap`: expected only keys whose effect is known \(unknown: logit_cap\)"),
    ],
)
def test_settings_that_cannot_be_expressed_are_named(copy: Path, changes: dict[str, Any], message: str | None) -> None:
    configured(copy, **changes)
    if message is None:  # generation_config.json decides the end of a generation, so a stale id here has no effect
        assert lowered(copy).model.eos_token_ids == (2,)  # that of the tokenizer, too
        return
    with pytest.raises(CheckpointError, match=message):
        lowered(copy)


def test_rope_theta_of_older_configurations(copy: Path) -> None:
    old = configured(copy, rope_parameters=..., rope_theta=500.0, rope_scaling=None, torch_dtype="bfloat16")
    assert lowered(old).model.layers[0].attention.rope.theta == 500.0


@pytest.mark.parametrize(
    ("own", "generation", "ending", "expected"),
    [
        (7, None, None, (7,)),
        (7, [5, 6, 5], None, (5, 6)),
        (None, None, None, ()),
        (None, None, "</s>", (2,)),
        (7, None, {"content": "</s>"}, (7, 2)),
        (7, [5, 2], "</s>", (5, 2)),
        (7, None, "no such token", (7,)),
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_end_tokens(copy: Path, own: Any, generation: Any, ending: Any, expected: tuple[int, ...], file: str) -> None:
    configured(copy, eos_token_id=own)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (copy / name).write_text(json.dumps({"eos_token": ending} if name == file and ending else {}))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert lowered(copy).model.eos_token_ids == expected


def test_end_tokens_that_are_none(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config.json`: key `eos_token_id`: expected token ids"):
        lowered(copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": 288}')
    with pytest.raises(CheckpointError, match="eos token 288 outside the vocabulary"):
        lowered(copy)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_name_their_tensor(copy: Path, value: float) -> None:
    tensors, name = load_file(copy / WEIGHTS_NAME), "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors[name][3, 4] = value
    save_file(tensors, copy / WEIGHTS_NAME)
    lowering = lowered(copy)
    lowering.unit(UnitKey(1, 1, "down"))
    with pytest.raises(CheckpointError, match=f"tensor `{name}` in .* holds NaN or infinite values"):
        lowering.unit(UnitKey(1, 2, "down"))


# OLMoE


@pytest.fixture
def olmoe(tmp_path: Path) -> Path:
    return save_tiny_olmoe(tmp_path / "olmoe", TinyMixtral(kv_heads=2, experts=5))


def test_olmoe_is_what_its_configuration_says(olmoe: Path) -> None:
    lowering, on_disk = lowered(olmoe), load_file(olmoe / WEIGHTS_NAME)
    model, layer = lowering.model, lowering.model.layers[1]
    assert (model.family, layer.attention.query_key_norm) == ("olmoe", "full")
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (5, 2, 96)
    assert not layer.experts.router.renormalize
    for key in lowering.units:
        name = f"model.layers.{key.layer}.mlp.experts.{key.expert}.{key.projection}_proj.weight"
        assert torch.equal(lowering.unit(key), on_disk[name])
    assert model.dense_shapes()["layers.0.query_norm"] == (64,)
    assert model.dense_shapes()["layers.0.key_norm"] == (32,)
    for name, on in (("query_norm", "self_attn.q_norm"), ("key_norm", "self_attn.k_norm"), ("router", "mlp.gate")):
        assert torch.equal(lowering.dense_weight(f"layers.1.{name}"), on_disk[f"model.layers.1.{on}.weight"])
    read = {source.name for source in (*lowering.dense.values(), *lowering.units.values())}
    assert read == set(on_disk), "every tensor is read"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_qkv": 8.0}, "key `clip_qkv`: expected null, found `8.0`"),
        ({"head_dim": 32}, "key `head_dim`: expected hidden_size 64 divided by 4 heads"),
        ({"attention_bias": True}, "key `attention_bias`"),
        ({"num_experts": 0}, "key `num_experts`: expected a whole number"),
        ({"hidden_act": "gelu"}, "key `hidden_act`"),
        ({"router_kind": "other"}, "unknown: router_kind"),
        ({"num_experts_per_tok": 9}, "contradicts itself: top_k must be 1 to 5"),
    ],
)
def test_olmoe_settings_that_cannot_be_expressed_are_named(olmoe: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        lowered(configured(olmoe, **changes))


@pytest.mark.parametrize("renormalized", [True, False])
def test_olmoe_says_whether_weights_are_renormalised(olmoe: Path, renormalized: bool) -> None:
    assert (
        lowered(configured(olmoe, norm_topk_prob=renormalized)).model.layers[0].experts.router.renormalize
        is renormalized
    )
    assert not lowered(configured(olmoe, norm_topk_prob=...)).model.layers[0].experts.router.renormalize


# Qwen3-MoE


@pytest.fixture
def qwen3_moe(tmp_path: Path) -> Path:
    return save_tiny_qwen3_moe(tmp_path / "qwen3", TinyMixtral(kv_heads=2, experts=5, head_size=32))


def test_qwen3_moe_is_what_its_configuration_says(qwen3_moe: Path) -> None:
    lowering, on_disk = lowered(qwen3_moe), load_file(qwen3_moe / WEIGHTS_NAME)
    model, layer = lowering.model, lowering.model.layers[1]
    assert (model.family, layer.attention.query_key_norm, layer.attention.head_size) == ("qwen3_moe", "head", 32)
    assert (layer.experts.count, layer.experts.top_k, layer.experts.width) == (5, 2, 96)
    assert not layer.experts.router.renormalize and layer.attention.sliding_window == 0
    for key in lowering.units:
        name = f"model.layers.{key.layer}.mlp.experts.{key.expert}.{key.projection}_proj.weight"
        assert torch.equal(lowering.unit(key), on_disk[name])
    assert model.dense_shapes()["layers.0.query_norm"] == model.dense_shapes()["layers.0.key_norm"] == (32,)
    assert model.dense_shapes()["layers.0.query"] == (4 * 32, 64)
    read = {source.name for source in (*lowering.dense.values(), *lowering.units.values())}
    assert read == set(on_disk), "every tensor is read"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0.5]}, "key `mlp_only_layers`: expected a list of layers"),
        ({"mlp_only_layers": [0, 1]}, "contradicts itself: no layer has routed experts"),
        ({"decoder_sparse_step": -1}, "key `decoder_sparse_step`: expected a whole number"),
        ({"attention_bias": True}, "key `attention_bias`"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "rope type `default`"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "parameters that transformers accepts"),
        ({"num_experts_per_tok": 9}, "contradicts itself: top_k must be 1 to 5"),
        ({"num_experts": 4}, "key `num_experts`: expected the 5 of `num_local_experts`, found `4`"),
        ({"num_local_experts": ...}, "key `num_experts`: expected a whole number"),
    ],
)
def test_qwen3_moe_settings_that_cannot_be_expressed_are_named(
    qwen3_moe: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        lowered(configured(qwen3_moe, **changes))


def test_qwen3_moe_counts_its_experts_under_either_name(qwen3_moe: Path) -> None:
    """Configurations on the hub have `num_experts`, those written by transformers 5 `num_local_experts`."""
    changed = configured(qwen3_moe, num_local_experts=..., num_experts=5)
    assert lowered(changed).model.layers[0].experts.count == 5


def test_qwen3_moe_slides_only_where_it_is_told_to(qwen3_moe: Path) -> None:
    changed = configured(qwen3_moe, sliding_window=7, use_sliding_window=False)
    assert lowered(changed).model.layers[0].attention.sliding_window == 0
    changed = configured(qwen3_moe, sliding_window=7, use_sliding_window=True)
    assert lowered(changed).model.layers[0].attention.sliding_window == 7
