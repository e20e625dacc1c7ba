"""Qwen2-MoE (Qwen1.5-MoE) and Qwen3-MoE: softmax router over all experts, optional plain layers in between.

Qwen2 adds biases of queries, keys and values, and a shared expert with its own gate.
Qwen3 norms each head of queries and keys. Two models continue it:
* Mellum 2 rotates layers with a window by another base than the others.
* Flint scores by sigmoid, has sinks, and rotates layers with a window alone. Its shared expert has no gate.
Source: transformers, models/qwen2_moe, qwen3_moe, mellum and flint, and conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.manifests.model import AttentionSpec, ExpertsSpec, RouterSpec, SharedSpec

from .decoder import (
    DecoderParts,
    attention_of,
    attentions_by_window,
    count_layers,
    experts_of,
    fixed,
    layers_of,
    read_plain_layers,
    read_routed,
    read_windows,
)
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(shared=("mlp.shared_expert",))
FLINT_NAMES = DecoderNames(shared=("mlp.shared_expert",), renamed={"sinks": "self_attn.softmax_offset"})


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


def mellum_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Mellum 2."""
    settings.passed_over("mtp_layer_types", "mtp_mlp_layer_types")
    bias = "all" if settings.boolean("attention_bias", False) else "none"
    layers, window = count_layers(settings), settings.integer("sliding_window")
    windows = read_windows(settings, [0] * layers, window)
    attentions = attentions_by_window(settings, windows, bias=bias, query_key_norm="head")
    router = RouterSpec("softmax", renormalize=settings.boolean("norm_topk_prob", True))
    experts = experts_of(settings, router, count=("num_experts", "num_local_experts"))
    return DecoderParts(layers_of(settings, attentions, experts, None, read_routed(settings, [True] * layers)))


def flint_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Flint."""
    window, layers = settings.integer("sliding_window"), count_layers(settings)
    rotated = attention_of(
        settings,
        sliding_window=window,
        bias="all" if settings.boolean("attention_bias", False) else "none",
        query_key_norm="head",
        sinks=True,
    )
    full = replace(rotated, rope=None, sliding_window=0)
    usual = [0 if layer < 2 or layer % 4 == 1 or layer == layers - 1 else window for layer in range(layers)]
    attentions = [rotated if size else full for size in read_windows(settings, usual, window)]
    router = RouterSpec("sigmoid", renormalize=settings.boolean("norm_topk_prob", True))
    experts = experts_of(settings, router, count=("num_experts", "num_local_experts"))
    shared = SharedSpec(settings.integer("shared_expert_intermediate_size"))
    return _layers(settings, attentions, experts, shared, plain=(0, 1))


def _experts(settings: Settings, *count: str) -> ExpertsSpec:
    router = RouterSpec("softmax", renormalize=settings.boolean("norm_topk_prob", False))
    return experts_of(settings, router, count=count)


def _layers(
    settings: Settings,
    attentions: list[AttentionSpec],
    experts: ExpertsSpec,
    shared: SharedSpec | None,
    plain: Sequence[int] = (),
) -> DecoderParts:
    """Return the layers: plain if `mlp_only_layers` or `decoder_sparse_step` says so, else routed.

    plain: the plain layers if config.json has no `mlp_only_layers`.
    """
    are_routed = [not is_plain for is_plain in read_plain_layers(settings, plain)]
    return DecoderParts(layers_of(settings, attentions, experts, shared, are_routed))
