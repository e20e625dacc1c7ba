"""Settings of config.json: which are accepted and mean what they say, and which are refused by name.

Published configurations are in the form of known checkpoints, and have as many weights as these are known to have.
Shapes and keys are those of each publisher, as far as public copies and counts of weights show them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from moec.compiler.checkpoint.checkpoint import Checkpoint
from moec.compiler.checkpoint.weight_files import TensorRef
from moec.compiler.families import Lowering, lower
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.manifests.errors import CheckpointError
from tests.compiler.lowered import configured, lowered
from tests.tiny_families import LONGROPE, TinyFamily, save_tiny_family

ORIGINAL = {"original_max_position_embeddings": 128}
# The form on the hub: the older name `type`, and the original context outside too.
OLD = {key: value for key, value in LONGROPE.items() if key not in ("rope_type", "rope_theta")} | {"type": "longrope"}


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that gives a copy of the checkpoint of a family, which a test may change."""
    return lambda family: Path(shutil.copytree(saved(family), tmp_path / "copy"))


@pytest.fixture
def copy(copied: Callable[[str], Path]) -> Path:
    return copied("mixtral")


def _longrope(**changes: Any) -> dict[str, Any]:
    found = {**LONGROPE, **ORIGINAL, **changes}
    return {"rope_parameters": {key: value for key, value in found.items() if value is not ...}}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mixtral": [
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
        ({"rope_parameters": ...}, "key `rope_theta`: expected a positive number, found nothing"),
        ({"rope_theta": 5.0}, "key `rope_theta`: expected the 10000.0 of `rope_parameters`, found `5.0`"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "key `rope_parameters`: expected rope type"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "key `rope_scaling`: expected rope type `default`"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2}}, "embedding without `factor`"),
        ({"attention_bias": True}, "key `attention_bias`: expected `False`, found `True`"),
        ({"logit_cap": 30}, r"key `logit_cap`: expected only keys whose effect is known \(unknown: logit_cap\)"),
    ],
    "olmoe": [
        ({"clip_qkv": 8.0}, "key `clip_qkv`: expected null, found `8.0`"),
        ({"head_dim": 32}, "key `head_dim`: expected hidden_size 64 divided by 4 heads"),
        ({"attention_bias": True}, "key `attention_bias`"),
        ({"num_experts": 0}, "key `num_experts`: expected a whole number"),
        ({"hidden_act": "gelu"}, "key `hidden_act`"),
        ({"router_kind": "other"}, "unknown: router_kind"),
        ({"num_experts_per_tok": 9}, "contradicts itself: top_k must be 1 to 5"),
    ],
    "qwen3_moe": [
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
    "deepseek-v2": [
        ({"topk_method": "noaux_tc"}, "key `topk_method`: expected one of `greedy`"),
        ({"norm_topk_prob": True}, "key `norm_topk_prob`: expected false"),
        ({"first_k_dense_replace": 3}, "key `first_k_dense_replace`: expected fewer layers than the 3"),
        ({"kv_lora_rank": 40}, "contradicts itself: rank must be a multiple of 16"),
        ({"moe_layer_freq": 2}, "key `moe_layer_freq`: expected `1`"),
    ],
    "deepseek-v3": [
        ({"n_group": 3}, "contradicts itself: 3 groups must divide 8 experts"),
        ({"scoring_func": "softmax"}, "key `scoring_func`: expected `sigmoid`"),
    ],
    "glm4": [
        ({"partial_rotary_factor": 2, "rope_parameters": ..., "rope_theta": 1e4}, "key `partial_rotary_factor`"),
    ],
    "ernie": [
        ({"use_bias": True}, "key `use_bias`: expected false"),
        ({"moe_layer_start_index": -5}, "key `moe_layer_start_index`: expected a layer"),
    ],
    "granite": [
        ({"logits_scaling": 0}, "key `logits_scaling`: expected a positive number"),
    ],
    "qwen2": [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "key `layer_types`"),
        ({"shared_expert_intermediate_size": 0}, "key `shared_expert_intermediate_size`: expected a whole"),
    ],
    "glm4-lite": [
        ({"mlp_layer_types": ["sparse"]}, "key `mlp_layer_types`: expected 3 times `dense` or `sparse`"),
        ({"mlp_layer_types": [["sparse"]] * 3}, "key `mlp_layer_types`"),
        ({"mlp_layer_types": ["dense"] * 3}, "contradicts itself: no layer has routed experts"),
    ],
    "minimax-m2": [
        ({"scoring_func": "softmax"}, "key `scoring_func`: expected `sigmoid`"),
        ({"use_routing_bias": False}, "key `use_routing_bias`: expected `True`"),
        ({"shared_intermediate_size": 64}, "key `shared_intermediate_size`: expected `0`"),
        (
            {"rotary_dim": 64, "rope_parameters": ..., "rope_theta": 1e4},
            "contradicts itself: rotary_size must not exceed head_size",
        ),
    ],
    "exaone": [
        ({"layer_types": None, "sliding_window_pattern": "LLG"}, "key `sliding_window_pattern`: expected a whole"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "key `sliding_window_pattern`: expected a whole"),
        ({"layer_types": [["full_attention"]] * 3}, "key `layer_types`"),
        ({"sliding_window": None}, "key `sliding_window`: expected a whole number"),
    ],
    "mellum": [
        ({"rope_parameters": ...}, "key `rope_parameters`: expected an object with `"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "an object with `sliding_attention`"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}},
            "a positive `rope_theta` of `sliding_attention`",
        ),
    ],
    "granite-swa": [
        ({"layer_rope_theta": [1e4]}, "key `layer_rope_theta`: expected 5 numbers, 0 or larger"),
        ({"layer_rope_theta": [-1] * 5}, "key `layer_rope_theta`: expected 5 numbers"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "key `layer_rope_theta`: expected the base of all layers, because",
        ),
    ],
    "deepseek": [
        ({"scoring_func": "sigmoid"}, "key `scoring_func`: expected `softmax`"),
        ({"first_k_dense_replace": 3}, "key `first_k_dense_replace`: expected fewer layers than the 3"),
        ({"first_k_dense_replace": False}, "key `first_k_dense_replace`: expected fewer layers than the 3"),
        ({"moe_layer_freq": 0}, "key `moe_layer_freq`: expected a whole number"),
        ({"norm_topk_prob": 1}, "key `norm_topk_prob`: expected true or false"),
        ({"n_routed_experts": ...}, "key `n_routed_experts`: expected a whole number"),
        ({"num_experts_per_tok": 9}, "contradicts itself: top_k must be 1 to 8, found 9"),
        ({"n_shared_experts": -1}, "key `n_shared_experts`: expected a whole number"),
        ({"attention_bias": True}, "key `attention_bias`: expected `False`"),
        ({"hidden_act": "gelu"}, "key `hidden_act`: expected one of `silu`"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "key `rope_scaling`: expected rope type"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
            "key `rope_scaling`: expected rope type `linear` or null",
        ),
        ({"rope_scaling": {"type": "linear"}}, "key `rope_scaling`: expected parameters that transformers"),
        ({"head_dim": 32}, "key `head_dim`: expected hidden_size divided by"),
        ({"partial_rotary_factor": 0.5}, "key `partial_rotary_factor`: expected 1"),
        ({"q_lora_rank": 8}, "unknown: q_lora_rank"),
    ],
    "minicpm": [
        ({"num_experts": ...}, "key `num_experts`: expected a whole number"),
        ({"num_experts": 0}, "key `num_experts`: expected a whole number"),
        ({"scale_emb": ...}, "key `scale_emb`: expected a positive number, found nothing"),
        ({"scale_depth": ...}, "key `scale_depth`: expected a positive number, found nothing"),
        ({"dim_model_base": 0}, "key `dim_model_base`: expected a positive number"),
        ({"hidden_act": "relu"}, "key `hidden_act`: expected one of `silu`"),
        ({"use_mup": False}, "unknown: use_mup"),
    ],
    "phimoe": [
        ({"num_experts_per_tok": 1}, "key `num_experts_per_tok`: expected 2"),
        ({"num_experts_per_tok": ...}, "key `num_experts_per_tok`: expected a whole number"),
        ({"num_local_experts": 1}, "contradicts itself: top_k must be 1 to 1, found 2"),
        ({"router_jitter_noise": -0.1}, "key `router_jitter_noise`: expected a number from 0"),
        ({"router_jitter_noise": "0.1"}, "key `router_jitter_noise`: expected a number from 0"),
        ({"lm_head_bias": 1}, "key `lm_head_bias`: expected true or false"),
        ({"attention_bias": "yes"}, "key `attention_bias`: expected true or false"),
        ({"sliding_window": -3}, "key `sliding_window`: expected a whole number"),
        ({"layer_types": ["sliding_attention"] * 3}, "key `layer_types`: expected"),
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
    "switch": [
        ({"dense_act_fn": "gated-gelu"}, "key `dense_act_fn`"),
        ({"is_gated_act": True}, "key `is_gated_act`"),
        ({"feed_forward_proj": "gelu"}, "key `feed_forward_proj`"),
        ({"d_kv": 0}, "key `d_kv`"),
        ({"is_encoder_decoder": False}, "key `is_encoder_decoder`"),
        ({"mystery": 1}, "key `mystery`"),
        ({"encoder_sparse_step": 1}, "key `encoder_sparse_step`"),
        ({"num_experts": ...}, "key `num_experts`"),
        ({"decoder_sparse_step": 4}, "key `decoder_sparse_step`"),
        ({"expert_capacity": -1}, "key `expert_capacity`"),
        ({"num_sparse_decoder_layers": 5}, "key `num_sparse_decoder_layers`"),
        ({"num_decoder_layers": 1025}, "key `num_decoder_layers`"),
        ({"router_dtype": "float16"}, "key `router_dtype`"),
        ({"relative_attention_max_distance": 9}, "max_distance must exceed 16"),
        ({"tie_encoder_decoder": True}, "key `tie_encoder_decoder`"),
    ],
}


@pytest.mark.parametrize(
    ("family", "changes", "message"), [(family, *case) for family, cases in REFUSED.items() for case in cases]
)
def test_settings_that_cannot_be_expressed_are_named(
    family: str, changes: dict[str, Any], message: str, copied: Callable[[str], Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        lowered(configured(copied(family), **changes))


def test_an_unknown_family_is_refused_by_name(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model family `dbrx` is unknown, expected one of .*`mixtral`"):
        lowered(configured(copy, model_type="dbrx"))


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
        (999, [5], None, (5,)),  # a stale id has no effect
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


@pytest.mark.parametrize("given", [True, False, ...])
def test_olmoe_says_whether_weights_are_renormalised(copied: Callable[[str], Path], given: Any) -> None:
    router = lowered(configured(copied("olmoe"), norm_topk_prob=given)).model.layers[0].experts.router
    assert router.renormalize is (given is True)


def test_qwen3_moe_counts_its_experts_under_either_name(copied: Callable[[str], Path]) -> None:
    """Configurations on the hub have `num_experts`, those written by transformers 5 `num_local_experts`."""
    changed = configured(copied("qwen3_moe"), num_local_experts=..., num_experts=5)
    assert lowered(changed).model.layers[0].experts.count == 5


@pytest.mark.parametrize(("slides", "window"), [(False, 0), (True, 7)])
def test_qwen3_moe_slides_only_where_it_is_told_to(copied: Callable[[str], Path], slides: bool, window: int) -> None:
    changed = configured(copied("qwen3_moe"), sliding_window=7, use_sliding_window=slides)
    assert lowered(changed).model.layers[0].attention.sliding_window == window


@pytest.mark.oracle
def test_defaults_of_phimoe_are_those_of_transformers(tmp_path: Path) -> None:
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
def test_phimoe_is_the_same_in_other_words(
    saved: Callable[[str], Path], copied: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    assert lowered(configured(copied("phimoe"), **changes)).model == lowered(saved("phimoe")).model


def test_without_longer_contexts_there_is_no_long_form(copied: Callable[[str], Path]) -> None:
    model = lowered(configured(copied("phimoe"), max_position_embeddings=128)).model
    rope = model.layers[0].attention.rope
    assert rope is not None and rope.long is None and rope.magnitude == 1.1
    assert model.original_positions == model.max_positions == 128


def test_a_configuration_that_transformers_refuses_is_a_checkpoint_error(copied: Callable[[str], Path]) -> None:
    """Its classes check their own keys, and raise an exception of transformers."""
    with pytest.raises(
        CheckpointError, match=r"transformers cannot build a layer of the model: .*output_router_logits"
    ):
        LoadedLayer(lowered(configured(copied("phimoe"), output_router_logits="perhaps")))


def test_keys_of_older_switch_configurations(copied: Callable[[str], Path]) -> None:
    copy = copied("switch")
    before = lowered(copy).model
    older = {
        "n_positions": 77, "feed_forward_proj": "relu", "is_gated_act": False, "output_past": True,
        "batch_prioritized_routing": False, "router_type": "tokens_masked", "encoder_sparse_step": ...,
    }  # fmt: skip
    model = lowered(configured(copy, **older)).model
    assert model.max_positions == 77 and model.layers == before.layers


def test_a_start_token_is_needed(copied: Callable[[str], Path]) -> None:
    copy = copied("switch")
    (copy / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="key `decoder_start_token_id`"):
        lowered(configured(copy, decoder_start_token_id=...))


PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
NAMES = [entry["checkpoint"].rpartition("/")[2] for entry in PUBLISHED]
_CORRECTIONS = (
    "mlp.gate.e_score_correction_bias",
    "mlp.moe_statics.e_score_correction_bias",
    "block_sparse_moe.e_score_correction_bias",
)


class _WithoutWeights(Checkpoint):
    """A checkpoint whose only tensors are score corrections of zeros."""

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return torch.zeros(self.tensors[name].shape)


def without_weights(folder: Path, config: Mapping[str, Any]) -> Lowering:
    """Return the lowering of a config.json without weights, as if none were stored quantized."""
    config = {key: value for key, value in config.items() if key != "quantization_config" or value is None}
    (folder / "config.json").write_text(json.dumps(config))
    counts = ("n_routed_experts", "moe_num_experts", "num_local_experts")
    experts = next((config[key] for key in counts if key in config), None)
    names = [f"model.layers.{at}.{name}" for at in range(config.get("num_hidden_layers", 0)) for name in _CORRECTIONS]
    tensors = {name: TensorRef("model.safetensors", "F32", (experts,), 0, 0) for name in names if experts}
    if config["model_type"] == "gpt_oss":  # as floats; MXFP4 has other names
        for name in (f"model.layers.{at}.mlp.experts.gate_up_proj" for at in range(config["num_hidden_layers"])):
            tensors[name] = TensorRef("model.safetensors", "BF16", (), 0, 0)
    return lower(_WithoutWeights(folder, "model", config, {}, tensors))


@pytest.mark.parametrize("entry", PUBLISHED, ids=NAMES)
def test_a_published_config_is_accepted_and_counted(entry: dict[str, Any], tmp_path: Path) -> None:
    """Where the sizes of all files are known, they are half of the weights at 16 bits, up to a tolerance."""
    model = without_weights(tmp_path, entry["config"]).model
    units = sum(math.prod(model.unit_shape(unit.layer, unit.projection)) for unit in model.unit_keys())
    weights = units + sum(map(math.prod, model.dense_shapes().values()))
    assert weights / 1e9 == pytest.approx(entry["billion_weights"], rel=entry.get("tolerance", 0.01))


@pytest.mark.parametrize(
    "changes",
    [
        {"unsloth_fixed": True, "unsloth_version": "2026.3.3"},
        {"_name_or_path": "/home/me/model", "quantization_config": None},
        {"shared_expert_intermediate_size": 0, "use_bias": False, "n_group": 1, "routed_scaling_factor": 1.0},
        {"some_future_key": None},
        {"hidden_dropout": 0.1, "pretraining_tp": 1, "num_nextn_predict_layers": 1},
        {"norm_topk_prob": True, "layer_types": ["full_attention"] * 32, "use_qk_norm": None},
        {"use_sliding_window": False, "max_window_layers": 28, "transformers.js_config": {"dtype": "q4"}},
    ],
)
def test_keys_without_effect_pass(changes: dict[str, Any], tmp_path: Path) -> None:
    without_weights(tmp_path, {**PUBLISHED[NAMES.index("Mixtral-8x7B-v0.1")]["config"], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "key `qkv_bias`: expected `False`"),
        ({"shared_expert_intermediate_size": 512}, "key `shared_expert_intermediate_size`: expected `0`"),
        ({"use_qk_norm": True}, "key `use_qk_norm`: expected `False`"),
        ({"routed_scaling_factor": 2.5}, "key `routed_scaling_factor`: expected `1`"),
        ({"final_logit_softcapping": 30.0}, "key `final_logit_softcapping`: expected `None`"),
        ({"some_future_key": False}, "unknown: some_future_key"),
        ({"norm_topk_prob": False}, "key `norm_topk_prob`: expected `True`"),
        ({"layer_types": ["sliding_attention"] * 32}, "key `layer_types`: expected `.'full_attention', "),
        ({"layer_types": ["full_attention"] * 31}, "key `layer_types`: expected `.'full_attention', "),
    ],
)
def test_keys_that_could_change_the_computation_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        without_weights(tmp_path, {**PUBLISHED[NAMES.index("Mixtral-8x7B-v0.1")]["config"], **changes})


def test_norms_of_heads_that_are_switched_off_are_refused(tmp_path: Path) -> None:
    config = {**PUBLISHED[NAMES.index("Qwen3-30B-A3B")]["config"], "use_qk_norm": False}
    with pytest.raises(CheckpointError, match="key `use_qk_norm`: expected `True`"):
        without_weights(tmp_path, config)
