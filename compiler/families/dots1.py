"""dots.llm1: Qwen3's attention with windows in the last layers, and routing as in DeepSeek-V3.

Source: transformers, models/dots1/modeling_dots1.py and configuration_dots1.py.
"""

from __future__ import annotations

from dataclasses import replace

from .decoder import (
    DecoderParts,
    attention_of,
    corrected_router,
    count_layers,
    experts_of,
    layers_of,
    plain_first,
    read_windows,
    shared_width,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .deepseek import ROUTED_EXPERTS, SHARED_EXPERTS
from .settings import Settings

NAMES = DecoderNames()
_WINDOW = 4096  # used if config.json has no `sliding_window`
_FULL_LAYERS = 62  # used if config.json has no `max_window_layers`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    attention = attention_of(
        settings,
        bias="all" if settings.boolean("attention_bias", False) else "none",
        query_key_norm="head",
    )
    window = settings.optional_integer("sliding_window", absent=_WINDOW) or 0
    first = settings.optional_integer("max_window_layers") or _FULL_LAYERS
    windows = [window if layer >= first else 0 for layer in range(count_layers(settings))]
    attentions = [replace(attention, sliding_window=size) for size in read_windows(settings, windows, window)]
    experts = experts_of(settings, corrected_router(settings, renormalize=False), count=ROUTED_EXPERTS)
    shared = shared_width(settings, SHARED_EXPERTS, experts.width, absent=0)
    layers = layers_of(settings, attentions, experts, shared, plain_first(settings, default=0))
    return DecoderParts(with_corrections(settings, NAMES, layers))
