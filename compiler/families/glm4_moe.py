"""GLM-4-MoE, and two models that are GLM-4-MoE with other sizes and names: Solar Open and Sarvam-30B.

A part of each head rotates, plain layers come first, a shared expert, routing as in DeepSeek-V3.
Source: transformers, models/glm4_moe, solar_open and sarvam_moe, and conversion_mapping.py.
"""

from __future__ import annotations

from moec.manifests.model import AttentionSpec

from .decoder import (
    DecoderParts,
    attention_of,
    corrected_router,
    count_layers,
    experts_of,
    layers_of,
    plain_first,
    shared_width,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .deepseek import ROUTED_EXPERTS, SARVAM_ROUTED_EXPERTS, SARVAM_SHARED_EXPERTS, SHARED_EXPERTS
from .settings import Settings

NAMES = DecoderNames()
SARVAM_NAMES = DecoderNames(
    corrections=("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    query_key_value="attention.query_key_value.weight",
    renamed={
        "embedding": "model.word_embeddings.weight",
        "query_norm": "attention.query_layernorm.weight",
        "key_norm": "attention.key_layernorm.weight",
        "output": "attention.dense.weight",
    },
)
_ROTARY_SHARE = 0.5  # used if config.json has no `partial_rotary_factor`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of GLM-4-MoE."""
    attention = attention_of(
        settings,
        rope_share=_ROTARY_SHARE,
        bias="inputs" if settings.boolean("attention_bias", False) else "none",
        query_key_norm="head" if settings.boolean("use_qk_norm", False) else "none",
    )
    return _parts(settings, attention, plain_first(settings, default=1), NAMES)


def solar_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Solar Open, whose layers are all routed."""
    attention = attention_of(settings, bias="inputs" if settings.boolean("attention_bias", False) else "none")
    return _parts(settings, attention, [True] * count_layers(settings), NAMES)


def sarvam_parts(settings: Settings) -> DecoderParts:
    """Read the settings of Sarvam-30B, also as its first release spelled them."""
    has_bias = settings.boolean("attention_bias", settings.boolean("use_qkv_bias", False))
    attention = attention_of(
        settings,
        bias="inputs" if has_bias else "none",
        query_key_norm="head" if settings.boolean("use_qk_norm", True) else "none",
    )
    are_routed = plain_first(settings, default=1)
    return _parts(
        settings, attention, are_routed, SARVAM_NAMES, SARVAM_ROUTED_EXPERTS, SARVAM_SHARED_EXPERTS, scale=2.5
    )


def _parts(
    settings: Settings,
    attention: AttentionSpec,
    are_routed: list[bool],
    names: DecoderNames,
    routed: tuple[str, ...] = ROUTED_EXPERTS,
    shared: tuple[str, ...] = SHARED_EXPERTS,
    scale: float = 1.0,
) -> DecoderParts:
    """Return layers of one attention. scale: the default of `routed_scaling_factor`."""
    experts = experts_of(settings, corrected_router(settings, scale=scale), count=routed)
    width = shared_width(settings, shared, experts.width, absent=1)
    layers = layers_of(settings, [attention] * len(are_routed), experts, width, are_routed)
    return DecoderParts(with_corrections(settings, names, layers))
