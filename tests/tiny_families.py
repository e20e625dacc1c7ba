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
}  # fmt: skip


def save_tiny_family(folder: Path, tiny: TinyFamily) -> Path:
    """Write a checkpoint with tokenizer into `folder` and return it."""
    settings = {key: value for key, value in {**_COMMON, **tiny.config}.items() if key != "rope_theta" or value}
    if tiny.name in ("GraniteMoe", "GptOss", "Phimoe"):
        del settings["moe_intermediate_size"]
    config = getattr(transformers, f"{tiny.name}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(tiny.seed)
        model = getattr(transformers, f"{tiny.name}ForCausalLM")(config)
        corrections = {}
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.data.normal_(std=0.3)
            elif name.endswith("gate.weight") and not parameter.any():
                # Releases of transformers before 5.23 leave the routers of Ernie at zero: all experts would tie.
                parameter.data.normal_(std=INITIALIZER_RANGE)
            if name.endswith("e_score_correction_bias"):
                corrections[name] = parameter.data.clone()
    transformers_logging.disable_progress_bar()
    model.to(getattr(torch, tiny.dtype))
    for name, values in corrections.items():  # checkpoints hold them in float32 whatever the rest is
        owner, _, last = name.rpartition(".")
        getattr(model.get_submodule(owner), last).data = values
    model.save_pretrained(folder, max_shard_size=tiny.shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder
