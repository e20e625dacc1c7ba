"""Laguna: a softplus gate for each head, its own rotary base and number of heads for each kind of layer.

Layers have windows or not. Routing is by sigmoids with a correction, next to a shared expert.
Source: transformers, models/laguna/modeling_laguna.py, configuration_laguna.py and conversion_mapping.py.
"""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import AttentionSpec, RouterSpec, SharedSpec

from .decoder import (
    DecoderParts,
    attentions_by_window,
    count_layers,
    experts_of,
    fixed,
    layers_of,
    read_routed,
    read_windows,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    corrections=("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    shared=("mlp.shared_expert", "mlp.shared_experts"),
    loaded_shared="mlp.shared_experts",
)
_WINDOW = 512  # used if config.json has no `sliding_window`
_PER_HEAD = (None, True, "per-head")


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over("gating_types", "moe_router_use_sigmoid", "mlp_only_layers", "decoder_sparse_step", "qkv_bias")
    for key, value in (
        ("norm_topk_prob", True),
        ("moe_apply_router_weight_on_input", False),
        ("moe_router_logit_softcapping", 0),
        ("swa_attention_sink_enabled", False),
    ):
        fixed(settings, key, value)
    layers = count_layers(settings)
    router = RouterSpec("sigmoid", renormalize=True, scale=settings.number("moe_routed_scaling_factor", 1.0))
    experts = experts_of(settings, router, count=("num_experts", "num_local_experts"))
    shared = SharedSpec(settings.integer("shared_expert_intermediate_size"))
    are_routed = read_routed(settings, [layer > 0 for layer in range(layers)])
    return DecoderParts(
        with_corrections(settings, NAMES, layers_of(settings, _attentions(settings), experts, shared, are_routed))
    )


def _attentions(settings: Settings) -> list[AttentionSpec]:
    """Return the attention of each layer. Raises CheckpointError."""
    gating = settings.raw("gating")
    if gating not in (*_PER_HEAD, "per-element"):
        settings.fail("gating", "true, `per-head` or `per-element`", "compile another checkpoint")
    bias = "all" if settings.boolean("attention_bias", False) else "none"
    # Laguna M has no windows: null or 0.
    window = 0 if settings.raw("sliding_window") == 0 else settings.optional_integer("sliding_window", _WINDOW) or 0
    layers = count_layers(settings)
    windows = read_windows(settings, [0] * layers, window)
    attentions = attentions_by_window(
        settings, windows, bias=bias, query_key_norm="head", output_gate="softplus", gates_heads=gating in _PER_HEAD
    )
    heads = settings.raw("num_attention_heads_per_layer")
    heads = [settings.integer("num_attention_heads")] * layers if heads is None else heads
    if not isinstance(heads, list) or len(heads) != layers or not all(type(count) is int for count in heads):
        settings.fail("num_attention_heads_per_layer", f"{layers} whole numbers")
    return [replace(attention, num_heads=count) for attention, count in zip(attentions, heads, strict=True)]
