"""The tensors of a GGUF file by the names that a Hugging Face folder has for them.

Names are those of llama.cpp's converter (gguf, constants.py). Most architectures share them. An entry tells the name in
the folder, and what the converter did that has to be undone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .header import StoredTensor

Config = Mapping[str, Any]
Undo = Callable[[Tensor, Config], Tensor]
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_exps.weight": "mlp.experts.{expert}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{expert}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{expert}.down_proj.weight",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_UNUSED = ("rope_freqs.weight",)
"""Tables that follow from config.json."""
EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an architecture that differ from the usual ones, by the end of the name in the file.

    undo: what turns a tensor into that of the folder, by the end of the name in the file.
    """

    outer: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    undo: Mapping[str, Undo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the folder: a tensor of the file, or one matrix of a stack.

    expert: the matrix in the stack; None: the tensor is whole.
    undo: what turns its values into those of the folder, None if they are equal.
    """

    stored: str
    expert: int | None = None
    undo: Undo | None = None


def unpermuted(heads_key: str) -> Undo:
    """Return what undoes llama.cpp's order of rows for its older rotary embedding: pairs in adjacent rows."""

    def undo(weight: Tensor, config: Config) -> Tensor:
        rows = weight.view(int(config[heads_key]), -1, 2, *weight.shape[1:])
        return rows.swapaxes(1, 2).reshape(weight.shape)

    return undo


def with_middle_axis(weight: Tensor, config: Config) -> Tensor:
    """Return kernels of a convolution [D, taps] as [D, 1, taps]."""
    return weight.unsqueeze(1)


_LLAMA = Names(
    layer={
        "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
        "ffn_gate_exps.weight": "block_sparse_moe.experts.{expert}.w1.weight",
        "ffn_up_exps.weight": "block_sparse_moe.experts.{expert}.w3.weight",
        "ffn_down_exps.weight": "block_sparse_moe.experts.{expert}.w2.weight",
    },
    undo={
        "attn_q.weight": unpermuted("num_attention_heads"),
        "attn_k.weight": unpermuted("num_key_value_heads"),
    },
)
_LFM2 = Names(
    outer={"token_embd_norm.weight": "model.embedding_norm.weight"},
    layer={
        "attn_norm.weight": "operator_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "attn_q_norm.weight": "self_attn.q_layernorm.weight",
        "attn_k_norm.weight": "self_attn.k_layernorm.weight",
        "attn_output.weight": "self_attn.out_proj.weight",
        "shortconv.in_proj.weight": "conv.in_proj.weight",
        "shortconv.conv.weight": "conv.conv.weight",
        "shortconv.out_proj.weight": "conv.out_proj.weight",
        "ffn_gate_inp.weight": "feed_forward.gate.weight",
        "exp_probs_b.bias": "feed_forward.expert_bias",
        "ffn_gate.weight": "feed_forward.w1.weight",
        "ffn_up.weight": "feed_forward.w3.weight",
        "ffn_down.weight": "feed_forward.w2.weight",
        "ffn_gate_exps.weight": "feed_forward.experts.{expert}.w1.weight",
        "ffn_up_exps.weight": "feed_forward.experts.{expert}.w3.weight",
        "ffn_down_exps.weight": "feed_forward.experts.{expert}.w2.weight",
    },
    undo={"shortconv.conv.weight": with_middle_axis},
)
_QWEN2 = Names(
    layer={
        "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
        "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
        "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
        "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    },
    undo={"ffn_gate_inp_shexp.weight": lambda weight, config: weight.reshape(1, -1)},
)
NAMES: Mapping[str, Names] = {
    "glm4moe": Names(),
    "lfm2moe": _LFM2,
    "llama": _LLAMA,
    "olmoe": Names(),
    "qwen2moe": _QWEN2,
    "qwen3moe": Names(),
}
"""Architectures whose files are read."""


def pieces(architecture: str, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Piece]]:
    """Yield the tensors of the folder with their pieces. A tensor without a known name keeps its own."""
    names = NAMES[architecture]
    outer, layer_names = {**_OUTER, **names.outer}, {**_LAYER, **names.layer}
    for stored, tensor in tensors.items():
        block = _BLOCK.fullmatch(stored)
        end, prefix = (stored, "") if block is None else (block[2], f"model.layers.{block[1]}.")
        name = (outer if block is None else layer_names).get(end)
        if name is None:
            if stored not in _UNUSED:
                yield stored, Piece(stored)
            continue
        undo = names.undo.get(end)
        if EXPERT not in name:
            yield prefix + name, Piece(stored, None, undo)
            continue
        for expert in range(tensor.shape[0]):
            yield prefix + name.replace(EXPERT, str(expert)), Piece(stored, expert, undo)
