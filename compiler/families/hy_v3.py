"""Hy3: a norm for each head, sigmoid scores with a correction and a scale, a shared expert, plain layers.

Source: transformers, models/hy_v3 and conversion_mapping.py.
"""

from __future__ import annotations

from moec.manifests.model import RouterSpec

from .decoder import (
    DecoderParts,
    attention_of,
    count_layers,
    experts_of,
    layers_of,
    read_routed,
    shared_width,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    routers=("mlp.router.gate.weight", "mlp.gate.weight"),
    corrections=("mlp.expert_bias", "mlp.e_score_correction_bias"),
    shared=("mlp.shared_mlp", "mlp.shared_experts"),
    loaded_shared="mlp.shared_experts",
)
_SCALE = 2.826  # used if config.json has no `router_scaling_factor`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over("enable_moe_fp32_combine")  # where float32 is rounded to 16 bits; here nowhere
    attention = attention_of(
        settings,
        bias="all" if settings.boolean("attention_bias", False) else "none",
        query_key_norm="head",
    )
    router = RouterSpec("sigmoid", renormalize=True, scale=settings.number("router_scaling_factor", _SCALE))
    experts = experts_of(settings, router, count=("num_experts", "num_local_experts"))
    shared = shared_width(settings, ("num_shared_experts",), experts.width, absent=1)
    layers = count_layers(settings)
    are_routed = read_routed(settings, [layer > 0 for layer in range(layers)])
    return DecoderParts(
        with_corrections(settings, NAMES, layers_of(settings, [attention] * layers, experts, shared, are_routed))
    )
