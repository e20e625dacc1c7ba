"""gpt-oss: attention sinks, windows in every second layer, biases everywhere, clamped and transposed experts.

Source: transformers, models/gpt_oss/modeling_gpt_oss.py and configuration_gpt_oss.py; gpt-oss model card, section 2.
"""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import LayerSpec, RouterSpec

from .decoder import DecoderParts, attention_of, count_layers, experts_of, read_windows
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(routers=("mlp.router.weight",), loaded_router="mlp.router.weight", is_transposed=True)
_WINDOW = 128  # used if config.json has no `sliding_window`
_SLOPE = 1.702  # slope of the sigmoid; the kernels support no other


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over("initial_context_length", "swiglu_alpha")
    packed = settings.raw("quantization_config")
    if packed is not None and (not isinstance(packed, dict) or packed.get("quant_method") != "mxfp4"):
        settings.fail("quantization_config", "null or `quant_method` mxfp4", "start from the checkpoint as published")
    if settings.raw("swiglu_alpha") not in (None, _SLOPE):
        settings.fail("swiglu_alpha", f"{_SLOPE}", "compile another checkpoint")
    attention = attention_of(settings, bias="all" if settings.boolean("attention_bias", True) else "none", sinks=True)
    experts = experts_of(
        settings,
        RouterSpec("softmax", renormalize=True, has_bias=True),  # equals a softmax over the chosen experts
        count=("num_local_experts",),
        top_k=("num_experts_per_tok", "experts_per_token"),
        width="intermediate_size",
        activation="clamped_swiglu",
        limit=settings.number("swiglu_limit", 7.0),
        has_bias=True,
    )
    window = settings.optional_integer("sliding_window", absent=_WINDOW) or 0
    layers = count_layers(settings)
    windows = read_windows(settings, [window if at % 2 == 0 else 0 for at in range(layers)], window)
    return DecoderParts(tuple(LayerSpec(replace(attention, sliding_window=size), experts) for size in windows))
