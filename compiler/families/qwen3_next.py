"""Qwen3-Next and Qwen3.5-MoE: layers with the gated delta rule, and layers with attention whose output is gated.

Norms are stored minus one, except that of the delta rule. Qwen3.5 holds the inputs of the delta rule in more matrices.
Source: transformers, models/qwen3_next and qwen3_5_moe, and conversion_mapping.py; Gated Delta Networks, section 3.
"""

from __future__ import annotations

from moec.manifests.model import DeltaSpec, RouterSpec, SharedSpec

from .decoder import (
    DecoderParts,
    Mixer,
    attention_of,
    count_layers,
    experts_of,
    fixed,
    layers_of,
    read_kinds,
    read_plain_layers,
    read_vector,
)
from .decoder_weights import DecoderNames
from .settings import Settings

_RECURRENT = {
    "taps": "linear_attn.conv1d.weight",
    "output_norm": "linear_attn.norm.weight",
    "output": "linear_attn.out_proj.weight",
}
_TABLES = {"log_rates": "linear_attn.A_log", "step_biases": "linear_attn.dt_bias"}
_SHARED = ("mlp.shared_expert",)
NAMES = DecoderNames(
    shared=_SHARED,
    recurrent=_RECURRENT,
    query_key_value_gate="linear_attn.in_proj_qkvz.weight",
    rate_step="linear_attn.in_proj_ba.weight",
    query_gate="self_attn.q_proj.weight",
    tables=_TABLES,
)
NAMES_3_5 = DecoderNames(
    shared=_SHARED,
    recurrent={
        **_RECURRENT,
        "output_gate": "linear_attn.in_proj_z.weight",
        "rate": "linear_attn.in_proj_b.weight",
        "step": "linear_attn.in_proj_a.weight",
    },
    query_key_value_rows="linear_attn.in_proj_qkv.weight",
    query_gate="self_attn.q_proj.weight",
    tables=_TABLES,
)
_KINDS = ("linear_attention", "full_attention")


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of Qwen3-Next."""
    are_plain = read_plain_layers(settings)
    return _parts(settings, are_plain, renormalize=settings.boolean("norm_topk_prob", True))


def parts_3_5(settings: Settings) -> DecoderParts:
    """Read the settings of Qwen3.5-MoE."""
    settings.passed_over("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of drafts
    settings.passed_over("mamba_ssm_dtype")  # states are float32
    fixed(settings, "attn_output_gate", True)
    return _parts(settings, [False] * count_layers(settings), renormalize=True)


def _parts(settings: Settings, are_plain: list[bool], renormalize: bool) -> DecoderParts:
    layers, step = count_layers(settings), settings.optional_integer("full_attention_interval") or 4
    usual = [_KINDS[(at + 1) % step == 0] for at in range(layers)]
    kinds = read_kinds(settings, "layer_types", _KINDS) or usual
    bias = "all" if settings.boolean("attention_bias", False) else "none"
    attention = attention_of(settings, rope_share=0.25, bias=bias, query_key_norm="head", output_gate="sigmoid")
    mixers = [attention if kind == _KINDS[1] else _delta(settings, at) for at, kind in enumerate(kinds)]
    experts = experts_of(settings, RouterSpec("softmax", renormalize), count=("num_experts",))
    shared = SharedSpec(settings.integer("shared_expert_intermediate_size"), has_gate=True)
    are_routed = [not is_plain for is_plain in are_plain]
    return DecoderParts(layers_of(settings, mixers, experts, shared, are_routed), {"norm_offset": 1.0})


def _delta(settings: Settings, layer: int) -> Mixer:
    heads = settings.integer("linear_num_value_heads")
    return DeltaSpec(
        key_heads=settings.integer("linear_num_key_heads"),
        value_heads=heads,
        key_size=settings.integer("linear_key_head_dim"),
        value_size=settings.integer("linear_value_head_dim"),
        taps=settings.integer("linear_conv_kernel_dim"),
        norm_eps=settings.number("rms_norm_eps"),
        log_rates=read_vector(settings, f"model.layers.{layer}.linear_attn.A_log", heads),
        step_biases=read_vector(settings, f"model.layers.{layer}.linear_attn.dt_bias", heads),
    )
