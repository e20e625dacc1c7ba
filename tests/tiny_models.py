"""Seeded random tiny checkpoints, written with transformers as a user's would be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from moec.manifests.bundle import DeviceSummary

VOCABULARY = 288  # 256 bytes, four special tokens, the rest never produced by the tokenizer
INITIALIZER_RANGE = (
    0.15  # larger than a trained model's, so that experts, routing and attention all matter to the logits
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
NO_DEVICE = DeviceSummary("unspecified", "0" * 64, 0, 0)


@dataclass(frozen=True)
class TinyMixtral:
    """One configuration. Widths are multiples of 32, so that every bitwidth fits with group sizes 32 and 0."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int | None = None
    experts: int = 4
    top_k: int = 2
    width: int = 96
    tied: bool = False
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    shard_size: str = "50GB"
    seed: int = 0


TINY_MODELS = {
    "plain": TinyMixtral(),
    "top1": TinyMixtral(top_k=1, experts=3, seed=1),
    "top4-tied": TinyMixtral(top_k=4, experts=8, tied=True, layers=3, seed=2),
    "sharded-half": TinyMixtral(dtype="float16", shard_size="100KB", seed=3),
    "window-heads": TinyMixtral(sliding_window=5, heads=3, kv_heads=1, head_size=32, hidden_size=64, seed=4),
}


def save_tiny_mixtral(folder: Path, tiny: TinyMixtral | None = None, **config: Any) -> Path:
    """Write a checkpoint with tokenizer into `folder` and return it. config: further keys of MixtralConfig."""
    tiny = tiny or TinyMixtral()
    settings = MixtralConfig(
        **_common(tiny), head_dim=tiny.head_size, num_local_experts=tiny.experts, sliding_window=tiny.sliding_window,
        **{"rope_theta": 10_000.0, **config},
    )  # fmt: skip
    return _save(folder, MixtralForCausalLM, settings, tiny.seed, tiny.dtype, tiny.shard_size)


def save_tiny_olmoe(folder: Path, tiny: TinyMixtral | None = None, **config: Any) -> Path:
    """An OLMoE checkpoint of these sizes; it has neither a head size of its own nor a sliding window."""
    tiny = tiny or TinyMixtral()
    settings = OlmoeConfig(**_common(tiny), num_experts=tiny.experts, **{"rope_theta": 10_000.0, **config})
    return _save(folder, OlmoeForCausalLM, settings, tiny.seed, tiny.dtype, tiny.shard_size)


def save_tiny_qwen3_moe(folder: Path, tiny: TinyMixtral | None = None, **config: Any) -> Path:
    """A Qwen3-MoE checkpoint of these sizes, every layer routed."""
    tiny = tiny or TinyMixtral()
    settings = Qwen3MoeConfig(
        **_common(tiny), head_dim=tiny.head_size or 32, num_experts=tiny.experts, moe_intermediate_size=tiny.width,
        sliding_window=tiny.sliding_window, use_sliding_window=tiny.sliding_window is not None,
        **{"rope_theta": 10_000.0, **config},
    )  # fmt: skip
    return _save(folder, Qwen3MoeForCausalLM, settings, tiny.seed, tiny.dtype, tiny.shard_size)


def _common(tiny: TinyMixtral) -> dict[str, Any]:
    """Return the settings that both configurations share."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.width,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "num_experts_per_tok": tiny.top_k,
        "tie_word_embeddings": tiny.tied,
        "max_position_embeddings": 128,
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _save(folder: Path, family: Any, settings: Any, seed: int, dtype: str, shard_size: str) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family(settings)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
    transformers_logging.disable_progress_bar()
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: any text, any script."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )
