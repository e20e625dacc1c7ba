"""DeepSeek-V2 and V3: latent attention, plain layers first, shared experts, experts chosen from groups.

V2 scores by softmax. V3 scores by sigmoid, with a correction that balances experts. GLM-4.7-Flash and Sarvam-105B are
V3 with other sizes.
Source: transformers, models/deepseek_v2, deepseek_v3, glm4_moe_lite and sarvam_mla; DeepSeek-V2, sections 2.1 and 2.2;
DeepSeek-V3, section 2.1.2.
"""

from __future__ import annotations

from moec.manifests.model import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, RouterSpec, SharedSpec

from .decoder import (
    DecoderParts,
    corrected_router,
    count_layers,
    experts_of,
    fixed,
    layers_of,
    plain_first,
    read_routed,
    shared_width,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .rope import read_rope, score_magnitude
from .settings import Settings

NAMES = DecoderNames()
ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts")
SHARED_EXPERTS = ("n_shared_experts",)
SARVAM_ROUTED_EXPERTS = ("n_routed_experts", "num_experts")
SARVAM_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
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
    attention, experts = _attention(settings, interleaved=True), experts_of(settings, router, count=ROUTED_EXPERTS)
    width = shared_width(settings, SHARED_EXPERTS, experts.width, absent=2)
    return DecoderParts(_layers(settings, attention, experts, width, plain_first(settings, default=0)))


def v3_parts(settings: Settings) -> DecoderParts:
    """Read the settings of DeepSeek-V3."""
    router = corrected_router(settings, scale=2.5, groups=8, kept_groups=4)
    return _v3_parts(settings, plain_first(settings, default=3), router)


def lite_parts(settings: Settings) -> DecoderParts:
    """Read the settings of GLM-4.7-Flash."""
    settings.passed_over("first_k_dense_replace")  # transformers reads `mlp_layer_types` alone
    are_routed = read_routed(settings, [layer > 0 for layer in range(count_layers(settings))])
    return _v3_parts(settings, are_routed, corrected_router(settings, scale=1.8))


def sarvam_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Sarvam-105B, also as its first release spelled them."""
    settings.passed_over("q_head_dim")
    are_routed, router = plain_first(settings, default=1), corrected_router(settings, scale=2.5)
    return _v3_parts(settings, are_routed, router, SARVAM_ROUTED_EXPERTS, SARVAM_SHARED_EXPERTS)


def _v3_parts(
    settings: Settings,
    are_routed: list[bool],
    router: RouterSpec,
    routed: tuple[str, ...] = ROUTED_EXPERTS,
    shared: tuple[str, ...] = SHARED_EXPERTS,
) -> DecoderParts:
    fixed(settings, "scoring_func", "sigmoid")
    fixed(settings, "topk_method", "noaux_tc")
    attention = _attention(settings, interleaved=settings.boolean("rope_interleave", True))
    experts = experts_of(settings, router, count=routed)
    width = shared_width(settings, shared, experts.width, absent=1)
    return DecoderParts(with_corrections(settings, NAMES, _layers(settings, attention, experts, width, are_routed)))


def _layers(
    settings: Settings,
    attention: AttentionSpec,
    experts: ExpertsSpec,
    shared: SharedSpec | None,
    are_routed: list[bool],
) -> tuple[LayerSpec, ...]:
    """Return the layers, which have one attention."""
    settings.passed_over(*TRAINING)
    fixed(settings, "moe_layer_freq", 1)
    return layers_of(settings, [attention] * len(are_routed), experts, shared, are_routed)


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
