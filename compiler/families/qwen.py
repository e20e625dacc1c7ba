"""Qwen2-MoE (Qwen1.5-MoE) and Qwen3-MoE: softmax router over all experts, optional plain layers in between.

Qwen2 adds biases of queries, keys and values, and a shared expert with its own gate.
Qwen3 norms each head of queries and keys.
Source: transformers, models/qwen2_moe and models/qwen3_moe.
"""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import AttentionSpec, ExpertsSpec, LayerSpec, RouterSpec, SharedSpec

from .decoder import (
    DecoderParts,
    attention_of,
    count_layers,
    experts_of,
    plain_layer,
    read_windows,
)
from .decoder_weights import DecoderNames
from .deepseek import fixed
from .settings import Settings

NAMES = DecoderNames(shared="mlp.shared_expert")


def qwen2_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Qwen2-MoE."""
    bias = "inputs" if settings.boolean("qkv_bias", True) else "none"
    attention = attention_of(settings, bias=bias)
    experts = _experts(settings, "num_experts")
    shared = SharedSpec(settings.integer("shared_expert_intermediate_size"), has_gate=True)
    window = settings.integer("sliding_window") if settings.raw("sliding_window") else 0
    last = settings.optional_integer("max_window_layers") or 0
    is_windowed = settings.boolean("use_sliding_window", False)
    # Without `layer_types`, every second layer has a window, as in transformers.
    windows = [window if is_windowed and at % 2 == 0 and at < last else 0 for at in range(count_layers(settings))]
    attentions = [replace(attention, sliding_window=size) for size in read_windows(settings, windows, window)]
    return _layers(settings, attentions, experts, shared)


def qwen3_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Qwen3-MoE."""
    window = settings.optional_integer("sliding_window") or 0
    fixed(settings, "use_qk_norm", True)
    attention = attention_of(
        settings,
        sliding_window=window if settings.boolean("use_sliding_window", False) else 0,
        query_key_norm="head",
    )
    experts = _experts(settings, "num_experts", "num_local_experts")
    return _layers(settings, [attention] * count_layers(settings), experts, None)


def _experts(settings: Settings, *count: str) -> ExpertsSpec:
    router = RouterSpec("softmax", renormalize=settings.boolean("norm_topk_prob", False))
    return experts_of(settings, router, count=count)


def _layers(
    settings: Settings, attentions: list[AttentionSpec], experts: ExpertsSpec, shared: SharedSpec | None
) -> DecoderParts:
    """Return the layers: plain if `mlp_only_layers` or `decoder_sparse_step` says so, else routed."""
    plain, step = settings.raw("mlp_only_layers") or [], settings.optional_integer("decoder_sparse_step") or 1
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        settings.fail("mlp_only_layers", "a list of layers")
    width = settings.optional_integer("intermediate_size") or experts.width
    layers = [
        LayerSpec(attention, experts, shared)
        if at not in plain and (at + 1) % step == 0
        else plain_layer(attention, width)
        for at, attention in enumerate(attentions)
    ]
    return DecoderParts(tuple(layers))
