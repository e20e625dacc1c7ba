"""Stand-ins: transformers models for families that transformers lacks. They compute the same as the family.

The reference model of such a family is its stand-in:
* DeepSeekMoE: Qwen2-MoE without biases, whose shared expert's gate is always open.
* MiniCPM-MoE: GraniteMoE. Its softmax over the chosen experts equals a renormalised softmax over all experts.

tests/oracles defines both families independently and compares them with their stand-ins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .model_files import ModelFiles

# Settings with the same name in all families. An absent key has the default of transformers' configuration.
_COMMON = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "num_experts_per_tok", "rope_scaling", "rope_parameters",
)  # fmt: skip
_THETA = 10_000.0


def is_stood_in(checkpoint: ModelFiles) -> bool:
    """Return whether transformers has no model of this family."""
    return checkpoint.config["model_type"] in _CONFIGS


def read_config(checkpoint: ModelFiles) -> Any:
    """Return transformers' configuration of a checkpoint or of its stand-in. Raises the errors of transformers."""
    make = _CONFIGS.get(checkpoint.config["model_type"])
    if make is not None:
        return make(checkpoint.config)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.root, local_files_only=True)
    return config if config.model_type == checkpoint.config["model_type"] else config.get_text_config()


def _deepseek(config: Mapping[str, Any]) -> Any:
    from transformers import Qwen2MoeConfig

    layers, step = config["num_hidden_layers"], config.get("moe_layer_freq") or 1
    first = config.get("first_k_dense_replace") or 0
    return Qwen2MoeConfig(
        **_common(config),
        tie_word_embeddings=config.get("tie_word_embeddings") or False,
        qkv_bias=False,
        num_experts=config["n_routed_experts"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_expert_intermediate_size=(config.get("n_shared_experts") or 0) * config["moe_intermediate_size"],
        norm_topk_prob=bool(config.get("norm_topk_prob")) and config["num_experts_per_tok"] > 1,
        mlp_only_layers=[at for at in range(layers) if at < first or at % step],
    )


def _minicpm(config: Mapping[str, Any]) -> Any:
    from transformers import GraniteMoeConfig

    tie = config.get("tie_word_embeddings")
    return GraniteMoeConfig(
        **_common(config),
        tie_word_embeddings=True if tie is None else tie,
        num_local_experts=config["num_experts"],
        attention_multiplier=(config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
        embedding_multiplier=config["scale_emb"],
        residual_multiplier=config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
        logits_scaling=config["hidden_size"] / config["dim_model_base"],
    )


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a common name. Keys about padding and end tokens are left out."""
    settings = {name: config[name] for name in _COMMON if config.get(name) is not None}
    settings.setdefault("num_key_value_heads", config["num_attention_heads"])
    return {**settings, "rope_theta": config.get("rope_theta") or _THETA}


_CONFIGS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {"deepseek": _deepseek, "minicpm": _minicpm}
