"""DeepSeekMoE and MiniCPM-MoE as torch modules, from their published definitions.

Tests compare the families with these modules. Attention, norms and rotary embeddings are those of transformers' Llama,
which both definitions use. Routing, experts, plain layers and scales are written here: one module per expert, with the
names on disk. No code of the compiler is used.

Shapes: B rows, T tokens, D hidden, N = B T, E experts, K top-k.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding


class Swiglu(nn.Module):
    """The function down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, width: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self._names = names
        gate, up, down = names
        self.add_module(gate, nn.Linear(hidden, width, bias=False))
        self.add_module(up, nn.Linear(hidden, width, bias=False))
        self.add_module(down, nn.Linear(width, hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        return down(torch.nn.functional.silu(gate(x)) * up(x))


class Routed(nn.Module):
    """Experts chosen for each token by a softmax over all of them, and shared experts."""

    def __init__(
        self, hidden: int, width: int, experts: int, top_k: int, names: tuple[str, str, str], divide: bool, shared: int
    ) -> None:
        """Make the modules.

        divide: divide weights of the chosen experts by their sum.
        shared: total width of the shared experts, 0 for none.
        """
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Swiglu(hidden, width, names) for _ in range(experts))
        self.shared_experts = Swiglu(hidden, shared, names) if shared else None
        self._top_k, self._divide = top_k, divide

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(self._top_k)
        if self._divide:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.stack(
            [
                sum(weight * self.experts[int(expert)](row) for weight, expert in zip(*of_row, strict=True))
                for row, *of_row in zip(rows, weights, chosen, strict=True)
            ]
        ).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm. Both outputs are scaled before they are added."""

    def __init__(self, config: LlamaConfig, at: int, mlp: nn.Module, scale: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(config, at), mlp
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._scale = scale

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self._scale * self.self_attn(self.input_layernorm(x), rotation, mask)[0]
        return x + self._scale * self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: LlamaConfig, layers: list[Layer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers, self.norm = nn.ModuleList(layers), LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Oracle(nn.Module):
    """A model whose parameters have the names of its checkpoint."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        """Make the modules.

        own: content of config.json.
        """
        super().__init__()
        make = {"deepseek": _deepseek_layer, "minicpm": _minicpm_layer}[own["model_type"]]
        is_minicpm = own["model_type"] == "minicpm"
        config = _llama(own)
        scale = own["scale_depth"] / math.sqrt(config.num_hidden_layers) if is_minicpm else 1.0
        layers = [Layer(config, at, make(own, at), scale) for at in range(config.num_hidden_layers)]
        self.model = Body(config, layers)
        self.is_tied = own.get("tie_word_embeddings", is_minicpm)
        if not self.is_tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)
        self._embedding_scale = own["scale_emb"] if is_minicpm else 1.0
        self._divisor = own["hidden_size"] / own["dim_model_base"] if is_minicpm else 1.0

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of token ids [B, T]."""
        x = self.model.embed_tokens(tokens) * self._embedding_scale
        length = tokens.shape[1]
        rotation = self._rotary(x, torch.arange(length).unsqueeze(0))
        mask = torch.full((1, 1, length, length), -math.inf).triu(1)
        for layer in self.model.layers:
            x = layer(x, rotation, mask)
        head = self.model.embed_tokens.weight if self.is_tied else self.lm_head.weight
        return torch.nn.functional.linear(self.model.norm(x) / self._divisor, head)

    def greedy(self, prompt: list[int], count: int, end: int) -> list[int]:
        """Return the most probable continuation, token by token, up to the end token."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count and tokens[-1] != end:
            tokens.append(int(self(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[len(prompt) :]


def load_oracle(folder: Path) -> Oracle:
    """Return the oracle of a checkpoint in float32. Its parameters are exactly the tensors on disk."""
    oracle = Oracle(json.loads((folder / "config.json").read_text()))
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    oracle.load_state_dict(tensors, strict=True)
    return oracle.float().eval()


def _llama(own: Mapping[str, Any]) -> LlamaConfig:
    names = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings "
        "rms_norm_eps rope_scaling"
    )
    shared = {name: own[name] for name in names.split(" ") if own.get(name) is not None}
    config = LlamaConfig(**shared, rope_theta=own.get("rope_theta", 10_000.0))
    config._attn_implementation = "eager"
    return config


def _deepseek_layer(own: Mapping[str, Any], at: int) -> nn.Module:
    names, hidden, width = ("gate_proj", "up_proj", "down_proj"), own["hidden_size"], own["moe_intermediate_size"]
    if at < own.get("first_k_dense_replace", 0) or at % own.get("moe_layer_freq", 1):
        return Swiglu(hidden, own["intermediate_size"], names)
    experts, top_k = own["n_routed_experts"], own["num_experts_per_tok"]
    divide = own.get("norm_topk_prob", False) and top_k > 1
    return Routed(hidden, width, experts, top_k, names, divide, (own.get("n_shared_experts") or 0) * width)


def _minicpm_layer(own: Mapping[str, Any], at: int) -> nn.Module:
    hidden, width, names = own["hidden_size"], own["intermediate_size"], ("w1", "w3", "w2")
    return Routed(hidden, width, own["num_experts"], own["num_experts_per_tok"], names, True, 0)
