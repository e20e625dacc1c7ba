"""Networks as folders of Hugging Face: the dense one as Llama, the one with experts as Qwen2-MoE."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from example_smollm2.network import FeedForward, Network, Shape

if TYPE_CHECKING:
    from example_smollm2.gguf_file import GgufModel

_PARTS = {
    "input_norm": "input_layernorm", "norm": "post_attention_layernorm",
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
}  # fmt: skip
_PROJECTIONS = ("gate", "up", "down")


def dense_network(model: "GgufModel") -> Network:
    """Return the network of a GGUF file, with weights that compute the same and lie on no grid of 16 levels.

    The file stores blocks of 32 weights on 16 levels, which formats of 4 bits would meet without an error. The gains
    of both norms are therefore multiplied into the products after them. Each value head and the columns of the output
    that read it, and each inner value of a feed-forward network, are scaled so that both sides have the same norm.
    """
    shape = Shape(
        model.layers, model.hidden, model.width, model.heads, model.kv_heads, model.vocabulary, model.context,
        model.theta, model.epsilon, shared=model.width,
    )  # fmt: skip
    network, tensors = Network(shape), model.tensors()
    network.embedding.data = tensors["model.embed_tokens.weight"]
    network.norm.data = tensors["model.norm.weight"]
    for at, layer in enumerate(network.layers):
        own = {name: tensors[f"model.layers.{at}.{disk}.weight"] for name, disk in _PARTS.items()}
        before, after = own.pop("input_norm"), own.pop("norm")
        value, output = _balanced_heads(own["value"] * before, own["output"], shape)
        gate, up, down = (tensors[f"model.layers.{at}.mlp.{name}_proj.weight"] for name in _PROJECTIONS)
        up, down = _balanced(up * after, down)
        layer.query.data, layer.key.data = own["query"] * before, own["key"] * before
        layer.value.data, layer.output.data = value, output
        parts = layer.feed_forward
        parts.gate.data, parts.up.data, parts.down.data = gate * after, up, down
    return network.requires_grad_(False)


def _balanced(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row and the column that reads it to the same norm. rows: [W, D], columns: [D, W]."""
    scale = (columns.norm(dim=0) / rows.norm(dim=1)).sqrt()
    return rows * scale[:, None], columns / scale


def _balanced_heads(value: Tensor, output: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Scale values and the columns of the output that read them. Several heads read one value head."""
    size, readers = shape.head_size, shape.heads // shape.kv_heads
    columns = output.view(shape.hidden, shape.kv_heads, readers, size)
    norms = columns.square().sum((0, 2)).sqrt().flatten()
    scale = (norms / value.norm(dim=1)).sqrt()
    spread = scale.view(shape.kv_heads, 1, size).expand(-1, readers, -1).flatten()
    return value * scale[:, None], output / spread


def write_network(folder: Path, network: Network, model: "GgufModel") -> None:
    """Write weights in bfloat16, settings and tokenizer. The weights are renamed into place last."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_of(network.shape, model.end_token))
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": model.end_token})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "model_max_length": network.shape.context,
            "chat_template": model.chat_template,
        },
    )
    model.tokenizer().save(str(folder / "tokenizer.json"))
    tensors = {
        name: (stored.part.detach() * stored.factor).to(torch.bfloat16).contiguous()
        for name, stored in _stored_weights(network).items()
    }
    new = folder / "model.safetensors.new"
    save_file(tensors, new, metadata={"format": "pt"})
    os.replace(new, folder / "model.safetensors")


def config_of(shape: Shape, end: int) -> dict[str, Any]:
    """Return the content of config.json."""
    common = {
        "bos_token_id": None, "eos_token_id": end, "pad_token_id": end, "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size, "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon, "rope_theta": shape.theta, "tie_word_embeddings": True,
        "vocab_size": shape.vocabulary, "attention_dropout": 0.0,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
    }  # fmt: skip
    if not shape.experts:
        own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": shape.width}
        return common | own | {"attention_bias": False, "mlp_bias": False}
    return common | {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "intermediate_size": shape.width,
        "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "qkv_bias": False, "use_sliding_window": False, "sliding_window": None,
        "output_router_logits": False, "router_aux_loss_coef": 0.0,
    }  # fmt: skip


@dataclass(frozen=True)
class _Stored:
    """A weight on disk: the part of a parameter that it is, and the factor by which it is larger on disk."""

    part: Tensor
    factor: int = 1


def _stored_weights(network: Network) -> dict[str, _Stored]:
    """Return the weights by the names of Hugging Face. Factors of shared and routed experts go into `down`."""
    shape = network.shape
    weights = {"model.embed_tokens.weight": _Stored(network.embedding), "model.norm.weight": _Stored(network.norm)}
    for at, layer in enumerate(network.layers):
        prefix, parts = f"model.layers.{at}.", layer.feed_forward
        weights |= {f"{prefix}{disk}.weight": _Stored(getattr(layer, name)) for name, disk in _PARTS.items()}
        if not shape.experts:
            weights |= _expert_weights(f"{prefix}mlp.", parts, 0, shape.width, 1)
            continue
        weights[f"{prefix}mlp.gate.weight"] = _Stored(parts.router)
        weights[f"{prefix}mlp.shared_expert_gate.weight"] = _Stored(parts.shared_gate)
        weights |= _expert_weights(f"{prefix}mlp.shared_expert.", parts, 0, shape.shared, 2)
        for expert in range(shape.experts):
            start = shape.shared + expert * shape.expert_width
            name = f"{prefix}mlp.experts.{expert}."
            weights |= _expert_weights(name, parts, start, shape.expert_width, shape.top_k)
    return weights


def _expert_weights(prefix: str, parts: FeedForward, start: int, width: int, factor: int) -> dict[str, _Stored]:
    """Return the matrices of one expert. factor: what its output is multiplied with."""
    inner = slice(start, start + width)
    return {
        f"{prefix}gate_proj.weight": _Stored(parts.gate[inner]),
        f"{prefix}up_proj.weight": _Stored(parts.up[inner]),
        f"{prefix}down_proj.weight": _Stored(parts.down[:, inner], factor),
    }


def read_network(folder: Path) -> Network:
    """Return the network of a folder that `write_network` wrote, with float32 weights that take no gradients."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        width=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        theta=config["rope_theta"],
        epsilon=config["rms_norm_eps"],
        shared=config.get("shared_expert_intermediate_size", config["intermediate_size"]),
        experts=config.get("num_experts", 0),
        top_k=config.get("num_experts_per_tok", 0),
    )
    network = Network(shape).requires_grad_(False)
    tensors = load_file(folder / "model.safetensors")
    for name, stored in _stored_weights(network).items():
        stored.part.copy_(tensors[name].float() / stored.factor)
    return network


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
