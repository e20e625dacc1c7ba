"""Tiny random Switch Transformers checkpoints, and what transformers makes of them token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.modeling_outputs import MoEModelOutput
from transformers.utils import logging as transformers_logging

from tests.tiny_models import INITIALIZER_RANGE, VOCABULARY, tiny_tokenizer

START = 0
_COMMON = {
    "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_experts": 4,
    "num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2,
    "decoder_start_token_id": START, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class TinySwitch:
    """One configuration. config: what differs from the common sizes."""

    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    shard_size: str = "50GB"
    seed: int = 0


# As base: every second layer routes. Dropped tokens, heads that do not make up the hidden size, a bias of the router,
# stacks of unequal height. Every layer routes, an output matrix of its own, distances beyond the last bucket.
TINY_SWITCHES = {
    "switch": TinySwitch(),
    "switch-capacity": TinySwitch(
        {
            "expert_capacity": 6, "d_kv": 32, "num_heads": 3, "router_bias": True, "num_experts": 6,
            "num_decoder_layers": 5, "num_sparse_encoder_layers": 1, "num_layers": 3, "num_sparse_decoder_layers": 5,
        },
        shard_size="100KB", seed=1,
    ),
    "switch-all-routed-half": TinySwitch(
        {
            "num_layers": 2, "num_decoder_layers": 3, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3,
            "num_experts": 8, "tie_word_embeddings": False, "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
        },
        dtype="float16", seed=2,
    ),
    "switch-small-steps": TinySwitch(
        {"num_layers": 3, "num_decoder_layers": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 3,
         "expert_capacity": 9, "eos_token_id": [2, 9]},
        seed=3,
    ),
}  # fmt: skip


def save_tiny_switch(folder: Path, tiny: TinySwitch | None = None, **config: Any) -> Path:
    """Write a checkpoint with tokenizer into `folder` and return it. config: further keys."""
    tiny = tiny or TinySwitch()
    with torch.random.fork_rng():
        torch.manual_seed(tiny.seed)
        model = SwitchTransformersForConditionalGeneration(
            SwitchTransformersConfig(**{**_COMMON, **tiny.config, **config})
        )
        for name, parameter in model.named_parameters():
            if name.endswith("layer_norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            elif name not in ("shared.weight", "lm_head.weight"):
                parameter.data.normal_(std=0.5 if "bias" in name else INITIALIZER_RANGE)
        for stack in (model.encoder, model.decoder):  # apart where the output matrix is, but equal
            stack.embed_tokens.weight.data.copy_(model.shared.weight.data)
    transformers_logging.disable_progress_bar()
    model.to(getattr(torch, tiny.dtype)).save_pretrained(folder, max_shard_size=tiny.shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def cache_argument(module: Any) -> str:
    """Return the name under which the forward pass takes its cache: releases before 5.24 call it `past_key_values`."""
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


class Oracle:
    """transformers' model in float32, called with one token at a time, as `generate` does."""

    def __init__(self, folder: Path) -> None:
        self.model = SwitchTransformersForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def encoded(self, prompt: list[int]) -> MoEModelOutput:
        """Return the output of the encoder for a prompt."""
        states = self.model.get_encoder()(input_ids=torch.tensor([prompt])).last_hidden_state
        return MoEModelOutput(last_hidden_state=states)

    @torch.no_grad()
    def logits(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """After each of the tokens, [T, V] float32."""
        states, rows = self.encoded(prompt), []
        cache = {cache_argument(self.model): EncoderDecoderCache(DynamicCache(), DynamicCache())}
        for token in tokens:
            last = torch.tensor([[token]])
            out = self.model(encoder_outputs=states, decoder_input_ids=last, use_cache=True, **cache)
            rows.append(out.logits[0].numpy())
        return np.concatenate(rows)

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The likeliest tokens one after the other; the cache of `generate` is wrong for stacks of unequal height."""
        ends = self.model.config.eos_token_id
        states, found = self.encoded(prompt), [START]
        cache = {cache_argument(self.model): EncoderDecoderCache(DynamicCache(), DynamicCache())}
        while len(found) <= count and found[-1] not in (ends if isinstance(ends, list) else [ends]):
            last = torch.tensor([found[-1:]])
            out = self.model(encoder_outputs=states, decoder_input_ids=last, use_cache=True, **cache)
            found.append(int(out.logits[0, -1].argmax()))
        return found[1:]
