"""GLM-4-MoE: half of each head rotates, plain layers first, a shared expert, routing as in DeepSeek-V3.

Source: transformers, models/glm4_moe/modeling_glm4_moe.py and configuration_glm4_moe.py.
"""

from __future__ import annotations

from moec.manifests.model import LayerSpec

from .decoder import DecoderParts, attention_of, experts_of, plain_first
from .decoder_weights import DecoderNames
from .deepseek import ROUTED_EXPERTS, corrected_router, shared_width, with_corrections
from .settings import Settings

NAMES = DecoderNames()
_ROTARY_SHARE = 0.5  # used if config.json has no `partial_rotary_factor`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    attention = attention_of(
        settings,
        rope_share=_ROTARY_SHARE,
        bias="inputs" if settings.boolean("attention_bias", False) else "none",
        query_key_norm="head" if settings.boolean("use_qk_norm", False) else "none",
    )
    experts = experts_of(settings, corrected_router(settings), count=ROUTED_EXPERTS)
    routed = LayerSpec(attention, experts, shared_width(settings, "n_shared_experts", experts.width))
    return DecoderParts(with_corrections(settings, NAMES, plain_first(settings, routed, default=1)))
