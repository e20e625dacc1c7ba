"""Tiny random checkpoints, as on the hub, of the families whose oracle is defined in this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from tests.oracles.models import Oracle
from tests.tiny_models import INITIALIZER_RANGE, VOCABULARY, tiny_tokenizer

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "rope_scaling": None,
    "initializer_range": INITIALIZER_RANGE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
    "attention_dropout": 0.0, "pretraining_tp": 1,
}  # fmt: skip
_DEEPSEEK = {
    **_COMMON, "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"}, "aux_loss_alpha": 0.001,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False,
}  # fmt: skip
_MINICPM = {
    **_COMMON, "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}, "num_experts": 6, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 16,
}  # fmt: skip


@dataclass(frozen=True)
class OwnFamily:
    """One configuration.

    config: content of config.json; None removes a key.
    """

    config: dict[str, Any]
    dtype: str = "bfloat16"
    shard_size: str = "50GB"
    seed: int = 0


OWN_FAMILIES = {
    "deepseek": OwnFamily({**_DEEPSEEK, "num_experts_per_tok": 4}, seed=40),
    "deepseek-every-other": OwnFamily(
        {
            **_DEEPSEEK, "num_hidden_layers": 5, "moe_layer_freq": 2, "norm_topk_prob": True, "n_shared_experts": 1,
            "num_key_value_heads": 4, "tie_word_embeddings": True,
        },
        seed=41,
    ),
    "deepseek-top1-half": OwnFamily(
        {
            **_DEEPSEEK, "num_experts_per_tok": 1, "norm_topk_prob": True, "first_k_dense_replace": 0,
            "n_shared_experts": None, "num_key_value_heads": None, "rope_theta": None,
        },
        dtype="float16", shard_size="100KB", seed=42,
    ),
    "deepseek-linear-rope": OwnFamily({**_DEEPSEEK, "rope_scaling": {"type": "linear", "factor": 2.0}}, seed=43),
    "minicpm": OwnFamily({**_MINICPM, "rope_theta": None}, seed=44),
    "minicpm-untied-half": OwnFamily(
        {
            **_MINICPM, "num_experts": 8, "num_experts_per_tok": 4, "num_hidden_layers": 4, "num_key_value_heads": 4,
            "tie_word_embeddings": False, "dim_model_base": 32, "scale_depth": 0.7,
        },
        dtype="float16", shard_size="100KB", seed=45,
    ),
    "minicpm-top1": OwnFamily(
        {
            **_MINICPM, "num_experts_per_tok": 1, "num_hidden_layers": 2, "scale_emb": 2.5,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        seed=46,
    ),
}  # fmt: skip


def save_own_family(folder: Path, own: OwnFamily) -> Path:
    """Write a checkpoint with its tokenizer into `folder`, and return the folder."""
    config = {key: value for key, value in own.config.items() if value is not None or key == "rope_scaling"}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with torch.random.fork_rng():
        torch.manual_seed(own.seed)
        oracle = Oracle(config)
        for name, parameter in oracle.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            else:
                parameter.data.normal_(std=INITIALIZER_RANGE)
    tensors = oracle.to(getattr(torch, own.dtype)).state_dict()
    save_torch_state_dict(tensors, folder, max_shard_size=own.shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder
