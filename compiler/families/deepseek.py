"""DeepSeek-V2 and V3: latent attention, plain layers first, shared experts, experts chosen from groups.

V2 scores by softmax. V3 scores by sigmoid, with a correction that balances experts.
Source: transformers, models/deepseek_v2 and models/deepseek_v3; DeepSeek-V2, sections 2.1 and 2.2; DeepSeek-V3,
section 2.1.2.
"""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, RouterSpec, SharedSpec

from .decoder import DecoderParts, experts_of, plain_first, read_corrections
from .decoder_weights import DecoderNames
from .rope import read_rope, score_magnitude
from .settings import Settings

NAMES = DecoderNames()
ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts")
_LATENT_NORM_EPS = 1e-6  # of both bottlenecks, fixed in the modeling code; other norms use `rms_norm_eps`
TRAINING = ("auto_map", "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux", "head_dim", "qk_head_dim")


def v2_parts(settings: Settings) -> DecoderParts:
    """Read the settings of DeepSeek-V2."""
    fixed(settings, "scoring_func", "softmax")
    if settings.boolean("norm_topk_prob", False):
        settings.fail("norm_topk_prob", "false, all that transformers computes", "compile another checkpoint")
    is_grouped = settings.one_of("topk_method", ("greedy", "group_limited_greedy")) != "greedy"
    groups, chosen_groups = (settings.optional_integer(key) or 1 for key in ("n_group", "topk_group"))
    router = RouterSpec(
        "softmax",
        renormalize=False,
        scale=settings.number("routed_scaling_factor", 1.0),
        groups=groups if is_grouped else 1,
        kept_groups=chosen_groups if is_grouped else 1,
    )
    return DecoderParts(
        _layers(settings, _attention(settings, interleaved=True), experts_of(settings, router, count=ROUTED_EXPERTS))
    )


def v3_parts(settings: Settings) -> DecoderParts:
    """Read the settings of DeepSeek-V3."""
    fixed(settings, "scoring_func", "sigmoid")
    fixed(settings, "topk_method", "noaux_tc")
    attention = _attention(settings, interleaved=settings.boolean("rope_interleave", True))
    layers = _layers(settings, attention, experts_of(settings, corrected_router(settings), count=ROUTED_EXPERTS))
    return DecoderParts(with_corrections(settings, NAMES, layers))


def corrected_router(settings: Settings) -> RouterSpec:
    """Return a router with sigmoid scores. A group scores by its best two. Corrections are read later.

    Raises CheckpointError.
    """
    return RouterSpec(
        "sigmoid",
        renormalize=settings.boolean("norm_topk_prob", True),
        scale=settings.number("routed_scaling_factor", 1.0),
        groups=settings.optional_integer("n_group") or 1,
        kept_groups=settings.optional_integer("topk_group") or 1,
        group_score="top2",
    )


def with_corrections(settings: Settings, names: DecoderNames, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, each router with its own correction. Raises CheckpointError or ValueError."""
    corrected = []
    for at, layer in enumerate(layers):
        experts = layer.experts
        if experts.count:
            correction = read_corrections(settings, names, at, experts.count)
            experts = replace(experts, router=replace(experts.router, correction=correction))
        corrected.append(replace(layer, experts=experts))
    return tuple(corrected)


def shared_width(settings: Settings, key: str, width: int) -> SharedSpec | None:
    """Return the shared experts as one expert of their total width, or None without any. Raises CheckpointError."""
    count = settings.raw(key)
    if count in (None, 0):
        return None
    return SharedSpec(settings.integer(key) * width)


def _layers(settings: Settings, attention: AttentionSpec, experts: ExpertsSpec) -> tuple[LayerSpec, ...]:
    """Return plain layers, then routed layers."""
    settings.passed_over(*TRAINING)
    fixed(settings, "moe_layer_freq", 1)
    shared = shared_width(settings, "n_shared_experts", experts.width)
    return plain_first(settings, LayerSpec(attention, experts, shared), default=0)


def _attention(settings: Settings, interleaved: bool) -> AttentionSpec:
    heads, rotary = settings.integer("num_attention_heads"), settings.integer("qk_rope_head_dim")
    settings.passed_over("num_key_value_heads")  # every head makes its own keys from the shared vector
    latent = LatentSpec(
        query_rank=settings.optional_integer("q_lora_rank") or 0,
        rank=settings.integer("kv_lora_rank"),
        plain_size=settings.integer("qk_nope_head_dim"),
        value_size=settings.integer("v_head_dim"),
        norm_eps=_LATENT_NORM_EPS,
    )
    head_size = latent.plain_size + rotary
    scale = head_size**-0.5 * score_magnitude(settings)
    rope = read_rope(settings, rotary, interleaved=interleaved)
    return AttentionSpec(heads, heads, head_size, rope, scale=scale, latent=latent)


def fixed(settings: Settings, key: str, value: object) -> None:
    """Check a key that must be absent or have this value. Raises CheckpointError."""
    if settings.raw(key) not in (None, value):
        settings.fail(key, f"`{value}`", "compile another checkpoint")
