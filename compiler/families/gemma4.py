"""Gemma 4 with experts: a dense branch next to the routed one, norms on both sides, wide heads in every sixth layer.

Layers with a window and layers without have heads and a rotary embedding of their own. In the latter values may be
the products of the keys. Per-layer embeddings and layers that share keys belong to other sizes and are refused.
Source: transformers, models/gemma4; the published config.json of gemma-4-26B-A4B.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moec.manifests.model import AttentionSpec, LayerSpec, RouterSpec, SharedSpec

from .decoder import DecoderParts, count_layers, experts_of, fixed, read_kinds, read_vector
from .decoder_weights import DecoderNames
from .rope import read_rope
from .settings import Settings

NAMES = DecoderNames(
    routers=("router.proj.weight",),
    loaded_router="router.proj.weight",
    experts="experts.{expert}.{projection}.weight",
    stacked=(("experts.gate_up_proj", "experts.down_proj"),),
    shared=("mlp",),
    own={
        "attention_after_norm": "post_attention_layernorm.weight",
        "shared_norm": "pre_feedforward_layernorm.weight",
        "shared_after_norm": "post_feedforward_layernorm_1.weight",
        "experts_norm": "pre_feedforward_layernorm_2.weight",
        "routed_after_norm": "post_feedforward_layernorm_2.weight",
        "experts_after_norm": "post_feedforward_layernorm.weight",
        "router_norm": "router.scale",
    },
    tables={"expert_scales": "router.per_expert_scale", "scale": "layer_scalar"},
)
_KINDS = ("sliding_attention", "full_attention")


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    # Pictures see each other; in a text a token sees those before it alone.
    settings.passed_over("use_bidirectional_attention", "vocab_size_per_layer_input", "use_double_wide_mlp")
    for key, value in (("enable_moe_block", True), ("num_kv_shared_layers", 0), ("hidden_size_per_layer_input", 0)):
        fixed(settings, key, value, is_required=True)
    settings.one_of("hidden_activation", ("gelu_pytorch_tanh",))
    layers, hidden = count_layers(settings), settings.integer("hidden_size")
    usual = [_KINDS[(at + 1) % 6 == 0] for at in range(layers)]
    kinds = [*(read_kinds(settings, "layer_types", _KINDS) or usual)[:-1], _KINDS[1]]  # as in transformers
    attentions = {kind: _attention(settings, kind) for kind in kinds}
    router = RouterSpec("softmax", renormalize=True, norm_scale=hidden**-0.5)
    experts = experts_of(settings, router, count=("num_experts",), top_k=("top_k_experts",), activation="gelu")
    shared = SharedSpec(settings.integer("intermediate_size"), has_norms=True)
    specs = list[LayerSpec]()
    for at, kind in enumerate(kinds):
        prefix = f"model.layers.{at}."
        scales = read_vector(settings, f"{prefix}router.per_expert_scale", experts.count)
        own = replace(experts, router=replace(router, expert_scales=scales))
        (scale,) = read_vector(settings, f"{prefix}layer_scalar", 1)
        specs.append(LayerSpec(attentions[kind], own, shared, norms_after=True, scale=scale))
    bound = settings.raw("final_logit_softcapping")
    more = {
        "embedding_scale": math.sqrt(hidden),
        "logit_softcap": settings.number("final_logit_softcapping") if bound else 0.0,
    }
    return DecoderParts(tuple(specs), more, ties=True, has_activation=False)


def _attention(settings: Settings, kind: str) -> AttentionSpec:
    """Return the attention of the layers of a kind. Raises CheckpointError or ValueError."""
    is_full = kind == "full_attention"
    size, heads = settings.integer("head_dim"), settings.integer("num_attention_heads")
    kv_heads, values_are_keys = settings.integer("num_key_value_heads"), settings.boolean("attention_k_eq_v", False)
    wide, few = settings.optional_integer("global_head_dim", absent=512), settings.raw("num_global_key_value_heads")
    for own in (settings.raw("per_layer_config") or {}).values():  # how transformers writes the two
        wide, few = own.get("head_dim", size), own.get("num_key_value_heads", kv_heads)
    if is_full:
        size, kv_heads = wide or size, few if few and values_are_keys else kv_heads
    return AttentionSpec(
        heads,
        kv_heads,
        size,
        read_rope(settings, size, layer_type=kind),
        sliding_window=0 if is_full else settings.integer("sliding_window"),
        query_key_norm="head",
        bias="all" if settings.boolean("attention_bias", False) else "none",
        scale=1.0,
        value_norm=True,
        value_is_key=is_full and values_are_keys,
    )
