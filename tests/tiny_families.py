"""Tiny random checkpoints of every family beyond Mixtral and OLMoE, each configuration for what it alone has."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from tests.tiny_models import INITIALIZER_RANGE, VOCABULARY, tiny_tokenizer

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "initializer_range": INITIALIZER_RANGE, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "rope_theta": 10_000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# Of heads of 16 features; the magnitudes differ, which those of published checkpoints do not.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_mscale": 1.1, "long_mscale": 1.3,
    "short_factor": [1.0 + 0.05 * at for at in range(8)], "long_factor": [1.5 + 0.75 * at for at in range(8)],
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TinyFamily:
    """One configuration. name: of the classes in transformers. config: what differs from the common sizes."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    shard_size: str = "50GB"
    seed: int = 0


TINY_FAMILIES = {
    "qwen2": TinyFamily("Qwen2Moe", {"num_experts": 6, "shared_expert_intermediate_size": 96}),
    "qwen2-plain-between": TinyFamily(
        "Qwen2Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2,
            "num_hidden_layers": 5, "mlp_only_layers": [3], "norm_topk_prob": True, "tie_word_embeddings": True,
        },
        dtype="float16", seed=1,
    ),
    "qwen2-window-no-bias": TinyFamily(
        "Qwen2Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 64, "qkv_bias": False,
            "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
        },
        shard_size="100KB", seed=2,
    ),
    "qwen3-plain-first": TinyFamily(
        "Qwen3Moe", {"num_experts": 8, "head_dim": 32, "mlp_only_layers": [0], "norm_topk_prob": True}, seed=3
    ),
    "qwen3-linear-rope": TinyFamily(
        "Qwen3Moe",
        {
            "num_experts": 4, "head_dim": 16, "rope_theta": None,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
        seed=4,
    ),
    "qwen3-llama3-rope": TinyFamily(
        "Qwen3Moe",
        {
            "num_experts": 4, "head_dim": 32, "rope_theta": None,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
        seed=20,
    ),
    "deepseek-v2": TinyFamily("DeepseekV2", {**_LATENT, "routed_scaling_factor": 1.5}, seed=5),
    "deepseek-v2-groups-yarn": TinyFamily(
        "DeepseekV2",
        {
            **_LATENT, "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "num_experts_per_tok": 3, "n_shared_experts": 2, "rope_theta": None, "routed_scaling_factor": 4.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        seed=6,
    ),
    "deepseek-v2-tied-half": TinyFamily(
        "DeepseekV2", {**_LATENT, "tie_word_embeddings": True, "first_k_dense_replace": 0, "num_experts_per_tok": 1},
        dtype="float16", shard_size="100KB", seed=7,
    ),
    "deepseek-v3": TinyFamily(
        "DeepseekV3", {**_LATENT, "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}, seed=8
    ),
    "deepseek-v3-yarn": TinyFamily(
        "DeepseekV3",
        {
            **_LATENT, "n_group": 1, "topk_group": 1, "rope_theta": None, "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        seed=9,
    ),
    "deepseek-v3-halves": TinyFamily(
        "DeepseekV3", {**_LATENT, "n_group": 2, "topk_group": 1, "rope_interleave": False, "n_routed_experts": 16,
                       "num_experts_per_tok": 8}, seed=10,
    ),
    "glm4": TinyFamily("Glm4Moe", {"n_routed_experts": 8, "head_dim": 32, "use_qk_norm": True}, seed=11),
    "glm4-bias": TinyFamily(
        "Glm4Moe",
        {
            "n_routed_experts": 8, "head_dim": 16, "attention_bias": True, "n_shared_experts": 2, "n_group": 2,
            "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "num_hidden_layers": 4,
        },
        seed=12,
    ),
    "glm4-tied-half": TinyFamily(
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "tie_word_embeddings": True,
         "norm_topk_prob": False, "first_k_dense_replace": 0},
        dtype="float16", shard_size="100KB", seed=13,
    ),
    "ernie": TinyFamily("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 4, "tie_word_embeddings": True}, seed=14),
    "ernie-no-shared": TinyFamily(
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False,
         "moe_layer_start_index": 0, "moe_layer_end_index": 1},
        seed=15,
    ),
    "ernie-every-other-half": TinyFamily(
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 1, "moe_layer_interval": 2, "num_hidden_layers": 4, "head_dim": 16},
        dtype="float16", shard_size="100KB", seed=16,
    ),
    "granite": TinyFamily("GraniteMoe", {"num_local_experts": 6}, seed=17),
    "granite-scaled": TinyFamily(
        "GraniteMoe",
        {
            "num_local_experts": 8, "num_experts_per_tok": 4, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
            "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "tie_word_embeddings": True,
        },
        seed=18,
    ),
    "granite-bias-half": TinyFamily(
        "GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_bias": True},
        dtype="float16", shard_size="100KB", seed=19,
    ),
    "gpt-oss": TinyFamily(
        "GptOss", {"num_local_experts": 6, "head_dim": 32, "sliding_window": 5, "swiglu_limit": 0.5}, seed=21
    ),
    "gpt-oss-yarn-shards": TinyFamily(
        "GptOss",
        {
            "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 16, "rope_theta": None,
            "num_hidden_layers": 4,
            "rope_parameters": {**YARN, "truncate": False},
        },
        shard_size="100KB", seed=22,
    ),
    "gpt-oss-top1-half": TinyFamily(
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "attention_bias": False, "sliding_window": 9,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": True},
        dtype="float16", seed=23,
    ),
    "phimoe": TinyFamily(
        "Phimoe",
        {
            "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2,
            "rope_theta": None, "max_position_embeddings": 256,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
        },
        seed=30,
    ),
    "phimoe-window-shards": TinyFamily(
        "Phimoe",
        {"num_local_experts": 8, "num_key_value_heads": 1, "sliding_window": 5, "lm_head_bias": True,
         "num_hidden_layers": 2},
        shard_size="100KB", seed=31,
    ),
    "phimoe-tied-half": TinyFamily(
        "Phimoe",
        {"num_local_experts": 4, "tie_word_embeddings": True, "attention_bias": True, "router_jitter_noise": 0.0,
         "num_key_value_heads": 4},
        dtype="float16", seed=32,
    ),
    "phimoe-tied-bias": TinyFamily(
        "Phimoe",
        {"num_local_experts": 16, "tie_word_embeddings": True, "lm_head_bias": True, "router_jitter_noise": 0.5},
        seed=33,
    ),
    "glm4-lite": TinyFamily("Glm4MoeLite", {**_LATENT, "q_lora_rank": 48, "routed_scaling_factor": 1.8}, seed=40),
    "glm4-lite-groups-yarn": TinyFamily(
        "Glm4MoeLite",
        {
            **_LATENT, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_theta": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        shard_size="100KB", seed=41,
    ),
    "glm4-lite-tied-half": TinyFamily(
        "Glm4MoeLite",
        {**_LATENT, "tie_word_embeddings": True, "norm_topk_prob": False, "rope_interleave": False,
         "num_experts_per_tok": 1, "mlp_layer_types": ["sparse"] * 3},
        dtype="float16", seed=42,
    ),
    "solar": TinyFamily("SolarOpen", {"n_routed_experts": 8, "head_dim": 32}, seed=43),
    "solar-bias-groups": TinyFamily(
        "SolarOpen",
        {"n_routed_experts": 8, "head_dim": 16, "attention_bias": True, "n_shared_experts": 2, "n_group": 4,
         "topk_group": 2, "routed_scaling_factor": 2.5, "num_experts_per_tok": 4},
        shard_size="100KB", seed=44,
    ),
    "solar-tied-half": TinyFamily(
        "SolarOpen",
        {"n_routed_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "tie_word_embeddings": True,
         "norm_topk_prob": False},
        dtype="float16", seed=45,
    ),
    "sarvam-moe": TinyFamily("SarvamMoE", {"n_routed_experts": 8, "head_dim": 32}, seed=46),
    "sarvam-moe-bias": TinyFamily(
        "SarvamMoE",
        {"n_routed_experts": 8, "head_dim": 16, "attention_bias": True, "use_qk_norm": False, "n_shared_experts": 2,
         "first_k_dense_replace": 2, "num_key_value_heads": 1, "num_experts_per_tok": 4},
        shard_size="100KB", seed=47,
    ),
    "sarvam-moe-tied-half": TinyFamily(
        "SarvamMoE",
        {"n_routed_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "tie_word_embeddings": True,
         "first_k_dense_replace": 0, "routed_scaling_factor": 1.5},
        dtype="float16", seed=48,
    ),
    "sarvam-mla": TinyFamily("SarvamMLA", {**_LATENT}, seed=49),
    "sarvam-mla-yarn": TinyFamily(
        "SarvamMLA",
        {
            **_LATENT, "q_lora_rank": 48, "first_k_dense_replace": 2, "n_shared_experts": 2, "rope_theta": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        shard_size="100KB", seed=50,
    ),
    "sarvam-mla-tied-half": TinyFamily(
        "SarvamMLA",
        {**_LATENT, "tie_word_embeddings": True, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 0},
        dtype="float16", seed=51,
    ),
    "dots1": TinyFamily(
        "Dots1", {"n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 32, "first_k_dense_replace": 1}, seed=52
    ),
    "dots1-windows": TinyFamily(
        "Dots1",
        {"n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 16, "norm_topk_prob": True, "max_window_layers": 1,
         "sliding_window": 5, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
        shard_size="100KB", seed=53,
    ),
    "dots1-tied-half": TinyFamily(
        "Dots1",
        {"n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16, "tie_word_embeddings": True,
         "num_experts_per_tok": 1, "attention_bias": True, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        dtype="float16", seed=54,
    ),
    "minimax-m2": TinyFamily("MiniMaxM2", {"num_local_experts": 8, "head_dim": 32, "rotary_dim": 16}, seed=55),
    "minimax-m2-whole": TinyFamily(
        "MiniMaxM2", {"num_local_experts": 6, "head_dim": 16, "num_experts_per_tok": 4, "num_key_value_heads": 1},
        shard_size="100KB", seed=56,
    ),
    "minimax-m2-tied-half": TinyFamily(
        "MiniMaxM2",
        {"num_local_experts": 4, "head_dim": 32, "num_experts_per_tok": 1, "tie_word_embeddings": True,
         "num_key_value_heads": 4, "partial_rotary_factor": 0.25},
        dtype="float16", seed=57,
    ),
    "hy3": TinyFamily("HYV3", {"num_experts": 8, "head_dim": 32}, seed=58),
    "hy3-bias": TinyFamily(
        "HYV3",
        {"num_experts": 6, "head_dim": 16, "attention_bias": True, "num_shared_experts": 2, "num_experts_per_tok": 4,
         "mlp_layer_types": ["sparse", "dense", "sparse"], "router_scaling_factor": 1.5},
        shard_size="100KB", seed=59,
    ),
    "hy3-tied-half": TinyFamily(
        "HYV3",
        {"num_experts": 4, "head_dim": 16, "num_experts_per_tok": 1, "tie_word_embeddings": True,
         "mlp_layer_types": ["sparse"] * 3, "num_key_value_heads": 4},
        dtype="float16", seed=60,
    ),
    "exaone": TinyFamily(
        "ExaoneMoe", {"num_experts": 8, "sliding_window": 5, "sliding_window_pattern": 2}, seed=61
    ),
    "exaone-listed": TinyFamily(
        "ExaoneMoe",
        {"num_experts": 8, "head_dim": 32, "sliding_window": 9, "sliding_window_pattern": "LLG",
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_shared_experts": 2,
         "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        shard_size="100KB", seed=62,
    ),
    "exaone-full-half": TinyFamily(
        "ExaoneMoe",
        {"num_experts": 4, "sliding_window": 9, "layer_types": ["full_attention"] * 3, "num_experts_per_tok": 1,
         "first_k_dense_replace": 0, "tie_word_embeddings": True, "norm_topk_prob": False},
        dtype="float16", seed=63,
    ),
    "mellum": TinyFamily(
        "Mellum",
        {
            "num_experts": 8, "head_dim": 32, "sliding_window": 5, "rope_theta": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
        seed=64,
    ),
    "mellum-plain-between": TinyFamily(
        "Mellum",
        {
            "num_experts": 6, "head_dim": 16, "sliding_window": 9, "rope_theta": None, "num_experts_per_tok": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False,
        },
        shard_size="100KB", seed=65,
    ),
    "mellum-tied-half": TinyFamily(
        "Mellum",
        {"num_experts": 4, "head_dim": 16, "num_experts_per_tok": 1, "rope_theta": None, "tie_word_embeddings": True},
        dtype="float16", seed=66,
    ),
    "flint": TinyFamily(
        "Flint",
        {"num_experts": 8, "head_dim": 32, "sliding_window": 5, "shared_expert_intermediate_size": 32,
         "num_hidden_layers": 5},
        seed=67,
    ),
    "flint-listed": TinyFamily(
        "Flint",
        {"num_experts": 6, "head_dim": 16, "sliding_window": 9, "shared_expert_intermediate_size": 96,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True,
         "mlp_only_layers": [1], "num_experts_per_tok": 4},
        shard_size="100KB", seed=68,
    ),
    "flint-tied-half": TinyFamily(
        "Flint",
        {"num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 1,
         "norm_topk_prob": False, "tie_word_embeddings": True, "mlp_only_layers": [], "sliding_window": 7,
         "layer_types": ["sliding_attention"] * 3},
        dtype="float16", seed=69,
    ),
    "granite-shared": TinyFamily(
        "GraniteMoeShared",
        {"num_local_experts": 6, "shared_intermediate_size": 32, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
         "residual_multiplier": 0.22, "attention_multiplier": 0.0625},
        seed=70,
    ),
    "granite-shared-none": TinyFamily(
        "GraniteMoeShared", {"num_local_experts": 8, "num_experts_per_tok": 4, "shared_intermediate_size": 0},
        shard_size="100KB", seed=71,
    ),
    "granite-shared-tied-half": TinyFamily(
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "shared_intermediate_size": 96, "attention_bias": True,
         "tie_word_embeddings": True},
        dtype="float16", seed=72,
    ),
    "granite-swa": TinyFamily(
        "GraniteMoeSWA",
        {"num_local_experts": 8, "sliding_window": 5, "layer_rope_theta": [0, 10_000.0, 1_000.0, 10_000.0, 0],
         "num_hidden_layers": 5, "shared_intermediate_size": 32, "attention_multiplier": 0.25},
        seed=73,
    ),
    "granite-swa-listed": TinyFamily(
        "GraniteMoeSWA",
        {"num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 9, "attention_bias": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "embedding_multiplier": 12.0,
         "attention_multiplier": 0.25},
        shard_size="100KB", seed=74,
    ),
    "laguna": TinyFamily(
        "Laguna",
        {
            "num_experts": 8, "head_dim": 32, "sliding_window": 5, "shared_expert_intermediate_size": 32,
            "rope_theta": None, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_attention_heads_per_layer": [4, 6, 2], "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 1.0},
            },
        },
        seed=76,
    ),
    "laguna-elements": TinyFamily(
        "Laguna",
        {"num_experts": 6, "head_dim": 16, "gating": "per-element", "shared_expert_intermediate_size": 96,
         "rope_theta": None, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "num_experts_per_tok": 4},
        shard_size="100KB", seed=77,
    ),
    "laguna-tied-half": TinyFamily(
        "Laguna",
        {"num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 1,
         "rope_theta": None, "tie_word_embeddings": True, "sliding_window": 7, "mlp_layer_types": ["sparse"] * 3,
         "layer_types": ["sliding_attention"] * 3},
        dtype="float16", seed=78,
    ),
    "afmoe": TinyFamily(
        "Afmoe",
        {"num_experts": 8, "head_dim": 32, "sliding_window": 5, "num_hidden_layers": 4, "num_shared_experts": 2,
         "route_scale": 2.5, "mup_enabled": True, "global_attn_every_n_layers": 2},
        seed=79,
    ),
    "afmoe-listed": TinyFamily(
        "Afmoe",
        {"num_experts": 6, "head_dim": 16, "sliding_window": 9, "num_shared_experts": 1, "num_dense_layers": 0,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True,
         "num_experts_per_tok": 4},
        shard_size="100KB", seed=80,
    ),
    "afmoe-tied-half": TinyFamily(
        "Afmoe",
        {"num_experts": 4, "head_dim": 16, "sliding_window": 7, "num_shared_experts": 1, "num_experts_per_tok": 1,
         "tie_word_embeddings": True, "num_dense_layers": 2},
        dtype="float16", seed=81,
    ),
    "kolibri": TinyFamily(
        "Kolibri1",
        {"num_experts": 8, "head_dim": 32, "sliding_window": 5, "shared_expert_intermediate_size": 32,
         "num_hidden_layers": 5, "norm_topk_prob": True},
        seed=82,
    ),
    "kolibri-listed": TinyFamily(
        "Kolibri1",
        {"num_experts": 6, "head_dim": 16, "sliding_window": 9, "shared_expert_intermediate_size": 96,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_experts_per_tok": 4},
        shard_size="100KB", seed=83,
    ),
    "kolibri-tied-half": TinyFamily(
        "Kolibri1",
        {"num_experts": 4, "head_dim": 16, "sliding_window": 7, "shared_expert_intermediate_size": 64,
         "num_experts_per_tok": 1, "tie_word_embeddings": True},
        dtype="float16", seed=84,
    ),
    "lfm2": TinyFamily(
        "Lfm2Moe",
        {"num_experts": 8, "num_hidden_layers": 5, "num_dense_layers": 1, "tie_word_embeddings": True,
         "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
        seed=85,
    ),
    "lfm2-no-bias": TinyFamily(
        "Lfm2Moe",
        {"num_experts": 6, "num_dense_layers": 0, "use_expert_bias": False, "conv_L_cache": 5, "norm_topk_prob": False,
         "num_experts_per_tok": 4, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False},
        shard_size="100KB", seed=86,
    ),
    "lfm2-half": TinyFamily(
        "Lfm2Moe",
        {"num_experts": 4, "num_experts_per_tok": 1, "num_dense_layers": 2, "routed_scaling_factor": 2.5,
         "layer_types": ["full_attention", "conv", "conv"], "conv_L_cache": 2},
        dtype="float16", seed=87,
    ),
    "qwen3-next": TinyFamily(
        "Qwen3Next",
        {"num_experts": 8, "head_dim": 32, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 32},
        seed=88,
    ),
    "qwen3-next-listed": TinyFamily(
        "Qwen3Next",
        {"num_experts": 6, "head_dim": 16, "shared_expert_intermediate_size": 96, "num_experts_per_tok": 4,
         "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mlp_only_layers": [1],
         "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 17,
         "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5},
        shard_size="100KB", seed=89,
    ),
    "qwen3-next-tied-half": TinyFamily(
        "Qwen3Next",
        {"num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 1,
         "tie_word_embeddings": True, "norm_topk_prob": False, "full_attention_interval": 2,
         "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 16},
        dtype="float16", seed=90,
    ),
    "qwen3.5": TinyFamily(
        "Qwen3_5MoeText",
        {"num_experts": 8, "head_dim": 32, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 32, "rope_theta": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                             "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        seed=91,
    ),
    "qwen3.5-listed": TinyFamily(
        "Qwen3_5MoeText",
        {"num_experts": 6, "head_dim": 16, "shared_expert_intermediate_size": 96, "num_experts_per_tok": 4,
         "layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_num_key_heads": 1,
         "linear_num_value_heads": 3, "linear_key_head_dim": 17, "linear_value_head_dim": 16,
         "linear_conv_kernel_dim": 3},
        shard_size="100KB", seed=92,
    ),
    "qwen3.5-tied-half": TinyFamily(
        "Qwen3_5MoeText",
        {"num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 1,
         "tie_word_embeddings": True, "full_attention_interval": 2, "linear_num_key_heads": 4,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
        dtype="float16", seed=93,
    ),
    "gemma4": TinyFamily(
        "Gemma4Text",
        {"num_experts": 8, "top_k_experts": 2, "num_hidden_layers": 4, "enable_moe_block": True,
         "hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
         "attention_k_eq_v": True, "final_logit_softcapping": 3.0, "sliding_window": 5, "rope_theta": None,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        seed=94,
    ),
    "gemma4-own-values": TinyFamily(
        "Gemma4Text",
        {"num_experts": 6, "top_k_experts": 4, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
         "head_dim": 16, "global_head_dim": 48, "sliding_window": 9, "tie_word_embeddings": False,
         "rope_theta": None, "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
             "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
         }},
        shard_size="100KB", seed=95,
    ),
    "gemma4-half": TinyFamily(
        "Gemma4Text",
        {"num_experts": 4, "top_k_experts": 1, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
         "head_dim": 32, "global_head_dim": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
         "sliding_window": 7, "rope_theta": None},
        dtype="float16", seed=96,
    ),
    "granite-swa-yarn-half": TinyFamily(
        "GraniteMoeSWA",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 7, "tie_word_embeddings": True,
         "rope_theta": None, "rope_parameters": YARN, "attention_multiplier": 0.25},
        dtype="float16", seed=75,
    ),
}  # fmt: skip

DENSE_ON_CPU = ("Lfm2Moe", "Qwen3Next", "Qwen3_5MoeText", "Gemma4Text")
"""Classes of transformers whose dense weights no accelerator computes."""

# One configuration of each family: the one with most of its special parts.
CHOSEN = {
    "qwen2_moe": "qwen2-plain-between", "qwen3_moe": "qwen3-plain-first", "deepseek_v2": "deepseek-v2-groups-yarn",
    "deepseek_v3": "deepseek-v3", "glm4_moe": "glm4-bias", "ernie4_5_moe": "ernie", "granitemoe": "granite-scaled",
    "gpt_oss": "gpt-oss", "phimoe": "phimoe", "deepseek": "deepseek-every-other", "minicpm": "minicpm",
    "glm4_moe_lite": "glm4-lite-groups-yarn", "solar_open": "solar-bias-groups", "sarvam_moe": "sarvam-moe-bias",
    "sarvam_mla": "sarvam-mla-yarn", "dots1": "dots1-windows", "minimax_m2": "minimax-m2", "hy_v3": "hy3-bias",
    "exaone_moe": "exaone-listed", "mellum": "mellum", "flint": "flint", "granitemoeshared": "granite-shared",
    "granitemoe_swa": "granite-swa", "kolibri1": "kolibri", "laguna": "laguna", "afmoe": "afmoe",
    "lfm2_moe": "lfm2", "qwen3_next": "qwen3-next", "qwen3_5_moe_text": "qwen3.5",
    "gemma4_text": "gemma4",
}  # fmt: skip


def save_tiny_family(folder: Path, tiny: TinyFamily) -> Path:
    """Write a checkpoint with tokenizer into `folder` and return it."""
    settings = {key: value for key, value in {**_COMMON, **tiny.config}.items() if key != "rope_theta" or value}
    if tiny.name == "Gemma4Text":
        del settings["num_experts_per_tok"]
    if tiny.name.startswith(("Granite", "GptOss", "Phimoe", "MiniMaxM2")):
        del settings["moe_intermediate_size"]
    config = getattr(transformers, f"{tiny.name}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(tiny.seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        corrections = {}
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            elif name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
                parameter.data.uniform_(0.7, 1.2)
            elif name.endswith(("bias", "sinks")):
                parameter.data.normal_(std=0.3)
            elif name.endswith("gate.weight") and not parameter.any():
                # Releases of transformers before 5.23 leave the routers of Ernie at zero: all experts would tie.
                parameter.data.normal_(std=INITIALIZER_RANGE)
            if name.endswith(("e_score_correction_bias", ".expert_bias")):
                corrections[name] = parameter.data.clone()
    transformers_logging.disable_progress_bar()
    model.to(getattr(torch, tiny.dtype))
    for name, values in corrections.items():  # checkpoints hold them in float32 whatever the rest is
        owner, _, last = name.rpartition(".")
        getattr(model.get_submodule(owner), last).data = values
    model.save_pretrained(folder, max_shard_size=tiny.shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder
