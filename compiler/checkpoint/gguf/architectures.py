"""The settings of each architecture of GGUF files, as config.json has them.

A function takes the metadata, the head and the settings that all architectures have. Source: llama.cpp, conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moec.manifests.errors import CheckpointError

from .header import GgufHead
from .metadata import Metadata

_SIGMOID = 2
"""Value of `expert_gating_func`."""
_MSCALE_UNIT = 0.1
"""`rope.scaling.yarn_log_multiplier` is this times DeepSeek's `mscale_all_dim`."""
_STILL = 1e20
"""Least divisor of a frequency that rotates no feature."""
_WINDOW_PERIOD = 4
"""Of AFMoE, K-EXAONE and Laguna, whose files may leave out which layers have a window."""
_PUBLISHED_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups of DeepSeek-V2 and V3 by their experts, and those that a token uses. Older files do not say them."""


def _olmoe(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_experts": metadata.integer("expert_count"), "norm_topk_prob": False}
    return {
        "model_type": "olmoe",
        **common,
        **experts,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_act": "silu",
    }


def _mixtral(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        **common,
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_act": "silu",
        "sliding_window": None,
    }


def _qwen_experts(metadata: Metadata) -> dict[str, Any]:
    width = metadata.integer("feed_forward_length", 0)  # of plain layers; Qwen3.5 has none
    of_expert = width // metadata.positive("expert_used_count")
    return {
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.positive("expert_feed_forward_length", of_expert),
        **({"intermediate_size": width} if width else {}),
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen2(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length")
    more = {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return {"model_type": "qwen2_moe", **common, **_qwen_experts(metadata), **more}


def _qwen3(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", **common, **_qwen_experts(metadata), "norm_topk_prob": True}


def _lfm2(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    kv_heads = metadata.of_layers("attention.head_count_kv", layers)
    has_corrections = any(name.endswith("exp_probs_b.bias") for name in head.tensors)
    return {
        "model_type": "lfm2_moe",
        **{key: value for key, value in common.items() if key not in ("rms_norm_eps", "tie_word_embeddings")},
        "tie_embedding": common["tie_word_embeddings"],
        "norm_eps": common["rms_norm_eps"],
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_dense_layers": metadata.integer("leading_dense_block_count"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "norm_topk_prob": True,
        "use_expert_bias": has_corrections,
    }


def _corrected(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of experts that DeepSeek's family tree shares."""
    groups, kept = metadata.integer("expert_group_count", 1), metadata.integer("expert_group_used_count", 1)
    if metadata.architecture == "deepseek2" and "expert_group_count" not in metadata:
        groups, kept = _PUBLISHED_GROUPS.get(metadata.integer("expert_count"), (1, 1))
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": kept,
        "hidden_act": "silu",
    }


def _glm4(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    share = metadata.integer("rope.dimension_count") / common["head_dim"]
    return {
        "model_type": "glm4_moe",
        **common,
        **_corrected(metadata),
        "partial_rotary_factor": share,
        "attention_bias": _has_bias(head),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in head.tensors,
    }


def _dots1(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "dots1", **common, **_corrected(metadata), "sliding_window": None}


def _deepseek_first(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSeekMoE-16B."""
    return {"model_type": "deepseek", **common, **_corrected(metadata), "scoring_func": "softmax"}


def _hy3(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    width = metadata.positive("expert_feed_forward_length")
    return {
        "model_type": "hy_v3",
        **common,
        "attention_bias": _has_bias(head),
        "mlp_layer_types": _layer_kinds(head, common),
        "num_experts": metadata.integer("expert_count"),
        "num_shared_experts": metadata.integer("expert_shared_feed_forward_length") // width,
        "moe_intermediate_size": width,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "router_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "hidden_act": "silu",
    }


def _has_bias(head: GgufHead) -> bool:
    return "blk.0.attn_q.bias" in head.tensors


def _layer_kinds(head: GgufHead, common: dict[str, Any]) -> list[str]:
    """Return which layers are plain."""
    return ["sparse" if is_routed else "dense" for is_routed in _are_routed(head, common)]


def _windowed(metadata: Metadata, layers: int, first_full: int) -> dict[str, Any]:
    """Return the windows of layers.

    first_full: the first layer without a window, if every `_WINDOW_PERIOD`-th layer has none and the file does not say.
    """
    window = metadata.integer("attention.sliding_window", 0)
    have_windows = [bool(window) and layer % _WINDOW_PERIOD != first_full for layer in range(layers)]
    if "attention.sliding_window_pattern" in metadata:
        have_windows = _windows(metadata, layers)
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in have_windows]
    return {"sliding_window": window, "layer_types": kinds}


def _afmoe(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "afmoe",
        **common,
        **_windowed(metadata, common["num_hidden_layers"], _WINDOW_PERIOD - 1),
        "attention_bias": _has_bias(head),
        "num_experts": metadata.integer("expert_count"),
        "num_shared_experts": metadata.integer("expert_shared_count", 0),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "route_scale": metadata.number("expert_weights_scale", 1.0),
        "route_norm": bool(metadata.get("expert_weights_norm", True)),
        "mup_enabled": True,  # as llama.cpp computes; files do not say it
        "hidden_act": "silu",
    }


def _exaone(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    experts = _corrected(metadata)
    del experts["n_routed_experts"], experts["n_shared_experts"], experts["first_k_dense_replace"]
    return {
        "model_type": "exaone_moe",
        **common,
        **experts,
        **_windowed(metadata, common["num_hidden_layers"], _WINDOW_PERIOD - 1),
        "mlp_layer_types": _layer_kinds(head, common),
        "num_experts": metadata.integer("expert_count"),
        "num_shared_experts": metadata.integer("expert_shared_count", 0),
    }


def _rotations(
    metadata: Metadata, common: dict[str, Any], full: dict[str, Any], sliding: dict[str, Any]
) -> dict[str, Any]:
    """Return the common settings with a rotary embedding for each kind of layer.

    full, sliding: further parameters of each.
    """
    base = {"rope_type": "default", "rope_theta": common["rope_theta"]}
    of_full = {**base, **common.get("rope_scaling", {}), **full}
    of_sliding = {**base, "rope_theta": metadata.number("rope.freq_base_swa", common["rope_theta"]), **sliding}
    rest = {key: value for key, value in common.items() if key not in ("rope_theta", "rope_scaling")}
    return rest | {"rope_parameters": {"full_attention": of_full, "sliding_attention": of_sliding}}


def _mellum(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    experts = _qwen_experts(metadata)
    del experts["use_sliding_window"]
    return {
        "model_type": "mellum",
        **_rotations(metadata, common, {}, {}),
        **experts,
        **_windowed(metadata, common["num_hidden_layers"], 0),
        "attention_bias": _has_bias(head),
        "mlp_layer_types": _layer_kinds(head, common),
        "norm_topk_prob": True,
    }


def _laguna(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    layers, size = common["num_hidden_layers"], common["head_dim"]
    heads = metadata.of_layers("attention.head_count", layers)
    gate = head.tensors.get("blk.0.attn_gate.weight")
    gates_heads = gate is not None and gate.shape[0] == heads[0]
    shares = [
        metadata.integer(f"rope.dimension_count{kind}", metadata.integer("rope.dimension_count", size)) / size
        for kind in ("", "_swa")
    ]
    return {
        "model_type": "laguna",
        **_rotations(metadata, common, *({"partial_rotary_factor": share} for share in shares)),
        **_windowed(metadata, layers, 0),
        "attention_bias": _has_bias(head),
        "mlp_layer_types": _layer_kinds(head, common),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gates_heads else "per-element",
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "moe_routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }


def _deepseek(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of DeepSeek-V3 and GLM-4.7-Flash if scores are sigmoids, else those of DeepSeek-V2."""
    is_corrected = any(name.endswith("exp_probs_b.bias") for name in head.tensors)
    is_sigmoid = metadata.integer("expert_gating_func", _SIGMOID if is_corrected else 0) == _SIGMOID
    rotary = metadata.integer("rope.dimension_count")
    of_keys, of_values = (
        metadata.integer(f"attention.{kind}_length_mla", metadata.integer(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    found = {key: value for key, value in common.items() if key not in ("head_dim", "num_key_value_heads")}
    if "rope.scaling.yarn_log_multiplier" in metadata and "rope_scaling" in found:
        magnitude = round(metadata.number("rope.scaling.yarn_log_multiplier") / _MSCALE_UNIT, 6)
        found["rope_scaling"] |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    experts = _corrected(metadata)
    if not is_sigmoid:
        experts["topk_method"] = "greedy" if experts["n_group"] == 1 else "group_limited_greedy"
    return {
        "model_type": "deepseek_v3" if is_sigmoid else "deepseek_v2",
        **found,
        **experts,
        "num_key_value_heads": found["num_attention_heads"],
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": of_keys - rotary,
        "v_head_dim": of_values,
    }


def _ernie(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    routed = [at for at, is_routed in enumerate(_are_routed(head, common)) if is_routed]
    return {
        "model_type": "ernie4_5_moe",
        **{key: value for key, value in common.items() if key != "num_experts_per_tok"},
        "moe_k": common["num_experts_per_tok"],
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(routed, default=0),
        "moe_layer_end_index": max(routed, default=-1),
        "hidden_act": "silu",
    }


def _are_routed(head: GgufHead, common: dict[str, Any]) -> list[bool]:
    return [f"blk.{layer}.ffn_gate_inp.weight" in head.tensors for layer in range(common["num_hidden_layers"])]


def _gemma4(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in _windows(metadata, layers)]
    kv_heads = dict(zip(kinds, metadata.of_layers("attention.head_count_kv", layers), strict=True))
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    apart = ("num_experts_per_tok", "rope_theta", "head_dim", "num_key_value_heads")
    return {
        "model_type": "gemma4_text",
        **{key: value for key, value in common.items() if key not in apart},
        "enable_moe_block": True,
        "num_experts": metadata.integer("expert_count"),
        "top_k_experts": common["num_experts_per_tok"],
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "layer_types": kinds,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "head_dim": metadata.integer("attention.key_length_swa"),
        "global_head_dim": common["head_dim"],
        "num_key_value_heads": kv_heads.get("sliding_attention", 0),
        "num_global_key_value_heads": kv_heads.get("full_attention", 0),
        "attention_k_eq_v": not any(f"blk.{layer}.attn_v.weight" in head.tensors for layer in full),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": common["rope_theta"],
                "partial_rotary_factor": _rotated_share(head),
            },
        },
    }


def _windows(metadata: Metadata, layers: int) -> list[bool]:
    """Return which layers have a window."""
    return metadata.flags_of_layers("attention.sliding_window_pattern", layers)


def _rotated_share(head: GgufHead) -> float:
    """Return the share of features that rotate. Divisors of the others are so large that they stand still."""
    stored = head.tensors.get("rope_freqs.weight")
    if stored is None or stored.kind != "F32" or len(stored.shape) != 1:
        raise CheckpointError(f"`{head.path}` has no numbers `rope_freqs.weight` of type F32", "copy the file again")
    divisors = np.fromfile(stored.file, "<f4", stored.shape[0], offset=stored.offset_bytes)
    rotated = int((divisors == 1).sum())
    if not (divisors[rotated:] > _STILL).all() or not (divisors[:rotated] == 1).all():
        raise CheckpointError(
            f"`{head.path}`: `rope_freqs.weight` holds {divisors[rotated]:g}, expected ones, then {_STILL:g} or more",
            "compile the model's Hugging Face folder",
        )
    return rotated / len(divisors)


def _gpt_oss(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    if "rope_scaling" in common:
        common["rope_scaling"]["truncate"] = False  # as published; files do not say it
    return {
        "model_type": "gpt_oss",
        **common,
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "hidden_act": "silu",
    }


def _granite(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    return {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **common,
        **({"shared_intermediate_size": shared} if shared else {}),
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "attention_multiplier": metadata.number("attention.scale", 1.0),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "hidden_act": "silu",
    }


def _minimax(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "minimax_m2",
        **common,
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "rotary_dim": metadata.integer("rope.dimension_count"),
        "hidden_act": "silu",
    }


def _delta(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of layers with a delta rule, and of Qwen's experts with a shared one."""
    layers = range(common["num_hidden_layers"])
    are_recurrent = [f"blk.{layer}.ssm_out.weight" in head.tensors for layer in layers]
    heads = metadata.integer("ssm.time_step_rank")
    experts = _qwen_experts(metadata)
    del experts["use_sliding_window"]
    return {
        **common,
        **experts,
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "layer_types": ["linear_attention" if recurrent else "full_attention" for recurrent in are_recurrent],
        "partial_rotary_factor": metadata.integer("rope.dimension_count") / common["head_dim"],
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(heads, 1),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def _qwen3_next(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_next", **_delta(metadata, head, common), "norm_topk_prob": True}


def _qwen3_5(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_5_moe_text", **_delta(metadata, head, common)}


ARCHITECTURES: Mapping[str, Callable[[Metadata, GgufHead, dict[str, Any]], dict[str, Any]]] = {
    "afmoe": _afmoe,
    "deepseek": _deepseek_first,
    "deepseek2": _deepseek,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie,
    "exaone-moe": _exaone,
    "gemma4": _gemma4,
    "glm4moe": _glm4,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite,
    "hy_v3": _hy3,
    "laguna": _laguna,
    "lfm2moe": _lfm2,
    "llama": _mixtral,
    "mellum": _mellum,
    "minimax-m2": _minimax,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2,
    "qwen35moe": _qwen3_5,
    "qwen3moe": _qwen3,
    "qwen3next": _qwen3_next,
}
"""Functions that return the settings, by architecture."""
