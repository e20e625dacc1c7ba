"""K-EXAONE: layers with a window rotate, layers without one have no positions; routing as in DeepSeek-V3.

Source: transformers, models/exaone_moe and models/exaone4, and conversion_mapping.py.
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
    read_routed,
    read_windows,
    shared_width,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(corrections=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"))
_PERIOD = 4  # used if config.json has neither `sliding_window_pattern` nor `layer_types`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    window = settings.integer("sliding_window")
    rotated = attention_of(settings, sliding_window=window, query_key_norm="head")
    full = replace(rotated, rope=None, sliding_window=0)
    attentions = [rotated if size else full for size in _windows(settings, window)]
    experts = experts_of(settings, corrected_router(settings, scale=2.5), count=("num_experts", "num_local_experts"))
    shared = shared_width(settings, ("num_shared_experts",), experts.width, absent=1)
    are_routed = read_routed(settings, plain_first(settings, default=1))
    return DecoderParts(with_corrections(settings, NAMES, layers_of(settings, attentions, experts, shared, are_routed)))


def _windows(settings: Settings, window: int) -> list[int]:
    """Return the window of each layer, 0 for none. Raises CheckpointError."""
    layers, period = count_layers(settings), settings.raw("sliding_window_pattern")
    period = _PERIOD if period is None or settings.raw("layer_types") is not None else period
    if type(period) is not int or period < 1:
        settings.fail("sliding_window_pattern", "a whole number, or a list `layer_types`")
    return read_windows(settings, [window if (layer + 1) % period else 0 for layer in range(layers)], window)
