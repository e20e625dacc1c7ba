"""Ernie 4.5 MoE: interleaved rotary pairs, plain layers around routed ones, shared experts, corrected softmax.

Source: transformers, models/ernie4_5_moe/modeling_ernie4_5_moe.py and configuration_ernie4_5_moe.py.
"""

from __future__ import annotations

from moec.manifests.model import LayerSpec, RouterSpec

from .decoder import DecoderParts, attention_of, count_layers, experts_of, plain_layer, shared_width, with_corrections
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(corrections=("mlp.moe_statics.e_score_correction_bias",))


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    # Weights are divided by max(their sum, moe_norm_min). Softmax shares never sum to so little.
    settings.passed_over("auto_map", "moe_norm_min", "moe_capacity", "moe_use_aux_free", "use_rmsnorm")
    if settings.boolean("use_bias", False):
        settings.fail("use_bias", "false", "compile a checkpoint without biases")
    attention = attention_of(settings, interleaved=True)
    router = RouterSpec("softmax", renormalize=True)
    experts = experts_of(settings, router, count=("moe_num_experts",), top_k=("moe_k",))
    routed = LayerSpec(attention, experts, shared_width(settings, ("moe_num_shared_experts",), experts.width, absent=2))
    plain = plain_layer(attention, settings.integer("intermediate_size"))
    layers, step = count_layers(settings), settings.optional_integer("moe_layer_interval") or 1
    first, last = (_bound(settings, key, default) for key, default in (("start", 1), ("end", -1)))
    last = layers - 1 if last == -1 else last
    ordered = (routed if (at + 1) % step == 0 and first <= at <= last else plain for at in range(layers))
    return DecoderParts(with_corrections(settings, NAMES, tuple(ordered)))


def _bound(settings: Settings, end: str, default: int) -> int:
    """Return the first or the last routed layer. Raises CheckpointError."""
    key = f"moe_layer_{end}_index"
    value = settings.raw(key)
    value = default if value is None else value
    if type(value) is not int or value < -1:
        settings.fail(key, "a layer, or -1 for the last")
    return int(value)
