"""AFMoE (Trinity): norms before and after, gates of features, no positions in layers without a window.

Routing is by sigmoids with a correction, next to shared experts.
Source: transformers, models/afmoe/modeling_afmoe.py and configuration_afmoe.py.
"""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import RouterSpec

from .decoder import (
    DecoderParts,
    attention_of,
    count_layers,
    experts_of,
    fixed,
    layers_of,
    read_windows,
    shared_width,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    routers=("mlp.router.gate.weight",),
    loaded_router="mlp.router.gate.weight",
    corrections=("mlp.expert_bias",),
    own={
        "output_gate": "self_attn.gate_proj.weight",
        "attention_after_norm": "post_attention_layernorm.weight",
        "experts_norm": "pre_mlp_layernorm.weight",
        "experts_after_norm": "post_mlp_layernorm.weight",
    },
)
_PERIOD, _PLAIN_LAYERS = 4, 1  # used if config.json has no `global_attn_every_n_layers`, no `num_dense_layers`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over("auto_map", "load_balance_coeff", "use_grouped_mm", "num_expert_groups", "num_limited_groups")
    for key, value in (("score_func", "sigmoid"), ("route_norm", True)):
        fixed(settings, key, value)
    layers, window = count_layers(settings), settings.integer("sliding_window")
    rotated = attention_of(
        settings,
        sliding_window=window,
        bias="all" if settings.boolean("attention_bias", False) else "none",
        query_key_norm="head",
        output_gate="sigmoid",
    )
    full = replace(rotated, rope=None, sliding_window=0)
    period = settings.optional_integer("global_attn_every_n_layers") or _PERIOD
    usual = [window if (layer + 1) % period else 0 for layer in range(layers)]
    attentions = [rotated if size else full for size in read_windows(settings, usual, window)]
    router = RouterSpec("sigmoid", renormalize=True, scale=settings.number("route_scale", 1.0))
    experts = experts_of(settings, router, count=("num_experts", "num_local_experts"))
    shared = shared_width(settings, ("num_shared_experts",), experts.width, absent=2)
    first = settings.raw("num_dense_layers")
    first = _PLAIN_LAYERS if first is None else first
    if type(first) is not int or not 0 <= first < layers:
        settings.fail("num_dense_layers", f"fewer layers than the {layers} there are")
    plain = layers_of(settings, attentions, experts, shared, [layer >= first for layer in range(layers)])
    normed = tuple(replace(layer, norms_after=True) for layer in with_corrections(settings, NAMES, plain))
    scale = settings.integer("hidden_size") ** 0.5 if settings.boolean("mup_enabled", False) else 1.0
    return DecoderParts(normed, {"embedding_scale": scale})
