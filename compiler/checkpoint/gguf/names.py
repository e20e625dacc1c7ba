"""The tensors of a GGUF file by the names that a Hugging Face folder has for them.

Names are those of llama.cpp's converter (gguf, constants.py). Most architectures share them. An entry tells the name in
the folder, and what the converter did that has to be undone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from . import undo
from .header import StoredTensor
from .undo import Undo

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
EXPERT = "{expert}"
_HALVES = {"ffn_gate_up_exps.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight")}
"""Stacks that hold two matrices of each expert, one above the other."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of the folder that is made of several. ends: of their names in the file."""

    ends: tuple[str, ...]
    undo: Undo


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an architecture that differ from the usual ones, by the end of the name in the file.

    undo: what turns a tensor into that of the folder, by the end of the name in the file.
    joined: tensors of a layer that are made of several, by name.
    unused: tensors outside the layers that say what the settings say.
    """

    outer: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    undo: Mapping[str, Undo] = field(default_factory=dict)
    joined: Mapping[str, Joined] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the folder, made of tensors of the file, mostly one, or of one matrix of a stack.

    expert: the matrix in the stack; None: the tensors are whole.
    half: 0 or 1 for the upper or lower half of its rows; None: all.
    undo: what turns their values into those of the folder, None if they are equal.
    """

    stored: tuple[str, ...]
    expert: int | None = None
    half: int | None = None
    undo: Undo | None = None


_LLAMA = Names(
    layer={
        "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
        "ffn_gate_exps.weight": "block_sparse_moe.experts.{expert}.w1.weight",
        "ffn_up_exps.weight": "block_sparse_moe.experts.{expert}.w3.weight",
        "ffn_down_exps.weight": "block_sparse_moe.experts.{expert}.w2.weight",
    },
    undo={
        "attn_q.weight": undo.unpermuted("num_attention_heads"),
        "attn_k.weight": undo.unpermuted("num_key_value_heads"),
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
    undo={"shortconv.conv.weight": undo.with_middle_axis},
)
_QWEN2 = Names(
    layer={
        "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
        "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
        "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
        "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    },
    undo={"ffn_gate_inp_shexp.weight": undo.as_row},
)
_SHARED = _QWEN2.layer
_DELTA = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",  # of early files
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_OFFSET_NORMS = dict.fromkeys(
    (
        "attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight",
        "output_norm.weight",
    ),
    undo.less_one,
)  # fmt: skip
_QWEN3_NEXT = Names(
    layer={**_SHARED, **_DELTA},
    undo={
        **_OFFSET_NORMS,
        "ffn_gate_inp_shexp.weight": undo.as_row,
        "ssm_a": undo.log_rates,
        "ssm_conv1d.weight": undo.with_middle_axis,
    },
    joined={
        "linear_attn.in_proj_qkvz.weight": Joined(("attn_qkv.weight", "attn_gate.weight"), undo.by_key_head),
    },
)
_QWEN3_5 = Names(
    layer={**_SHARED, **_DELTA},
    undo={
        **_OFFSET_NORMS,
        "ffn_gate_inp_shexp.weight": undo.as_row,
        "attn_qkv.weight": undo.grouped_values,
        "attn_gate.weight": undo.grouped_rows,
        "ssm_alpha.weight": undo.grouped_rows,
        "ssm_beta.weight": undo.grouped_rows,
        "ssm_a": undo.in_turn(undo.log_rates, undo.grouped_rows),
        "ssm_dt.bias": undo.grouped_rows,
        "ssm_conv1d.weight": undo.in_turn(undo.grouped_values, undo.with_middle_axis),
        "ssm_out.weight": undo.grouped_columns,
    },
)
_GPT_OSS = Names(
    layer={
        "ffn_gate_inp.weight": "mlp.router.weight",
        "ffn_gate_inp.bias": "mlp.router.bias",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    joined={
        "mlp.experts.gate_up_proj_bias": Joined(("ffn_gate_exps.bias", "ffn_up_exps.bias"), undo.alternating),
    },
)
_GEMMA4 = Names(
    layer={
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_exps.weight": "experts.{expert}.gate_proj.weight",
        "ffn_up_exps.weight": "experts.{expert}.up_proj.weight",
        "ffn_down_exps.weight": "experts.{expert}.down_proj.weight",
    },
    unused=("rope_freqs.weight",),
)
_DEEPSEEK2 = Names(
    layer={
        "attn_q_a.weight": "self_attn.q_a_proj.weight",
        "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
        "attn_q_b.weight": "self_attn.q_b_proj.weight",
        "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    },
    joined={"self_attn.kv_b_proj.weight": Joined(("attn_k_b.weight", "attn_v_b.weight"), undo.latent_up)},
)
_MINIMAX = Names(
    layer={**_LLAMA.layer, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
)
_AFMOE = Names(
    layer={
        "ffn_norm.weight": "pre_mlp_layernorm.weight",
        "post_ffw_norm.weight": "post_mlp_layernorm.weight",
        "attn_gate.weight": "self_attn.gate_proj.weight",
        "ffn_gate_inp.weight": "mlp.router.gate.weight",
        "exp_probs_b.bias": "mlp.expert_bias",
    },
)
_GRANITE = Names(
    layer={
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    },
    undo=_LLAMA.undo,
    joined={
        "shared_mlp.input_linear.weight": Joined(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), undo.as_one),
    },
)
NAMES: Mapping[str, Names] = {
    "afmoe": _AFMOE,
    "deepseek": Names(undo=_LLAMA.undo),
    "deepseek2": _DEEPSEEK2,
    "dots1": Names(),
    "ernie4_5-moe": Names(layer={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}),
    "exaone-moe": Names(),
    "gemma4": _GEMMA4,
    "glm4moe": Names(),
    "gpt-oss": _GPT_OSS,
    "granitemoe": _GRANITE,
    "hy_v3": Names(layer=dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.expert_bias")),
    "laguna": Names(layer={"attn_gate.weight": "self_attn.g_proj.weight"}),
    "lfm2moe": _LFM2,
    "llama": _LLAMA,
    "mellum": Names(),
    "minimax-m2": _MINIMAX,
    "olmoe": Names(),
    "qwen2moe": _QWEN2,
    "qwen35moe": _QWEN3_5,
    "qwen3moe": Names(),
    "qwen3next": _QWEN3_NEXT,
}
"""Architectures whose files are read."""


def pieces(architecture: str, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Piece]]:
    """Yield the tensors of the folder with their pieces. A tensor without a known name keeps the end of its own."""
    names = NAMES[architecture]
    outer, of_layer = {**_OUTER, **names.outer}, {**_LAYER, **names.layer}
    blocks = defaultdict[str, dict[str, str]](dict)
    for stored in tensors:
        block = _BLOCK.fullmatch(stored)
        if block is not None:
            blocks[block[1]][block[2]] = stored
        elif stored not in names.unused:
            yield outer.get(stored, stored), Piece((stored,), undo=names.undo.get(stored))
    for number, ends in blocks.items():
        prefix = f"model.layers.{number}."
        for name, joined in names.joined.items():
            if all(end in ends for end in joined.ends):
                yield prefix + name, Piece(tuple(ends.pop(end) for end in joined.ends), undo=joined.undo)
        for end, stored in ends.items():
            yield from _of_layer(of_layer, names.undo.get(end), prefix, end, stored, tensors[stored].shape[0])


def _of_layer(
    known: Mapping[str, str], undo_it: Undo | None, prefix: str, end: str, stored: str, experts: int
) -> Iterator[tuple[str, Piece]]:
    """Yield what one tensor of a layer is in the folder.

    known: names in the folder by the end of the name in the file.
    experts: of a stack.
    """
    for half, of_half in enumerate(_HALVES.get(end, ())):
        for expert in range(experts):
            yield prefix + known[of_half].replace(EXPERT, str(expert)), Piece((stored,), expert, half)
    if end in _HALVES:
        return
    name = known.get(end, end)
    if EXPERT not in name:
        yield prefix + name, Piece((stored,), undo=undo_it)
        return
    for expert in range(experts):
        yield prefix + name.replace(EXPERT, str(expert)), Piece((stored,), expert, undo=undo_it)
