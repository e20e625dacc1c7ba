"""GraniteMoE: softmax over the chosen experts, stacked experts on disk, multipliers of embeddings and residuals.

GraniteMoE-shared adds a shared expert. GraniteMoE-SWA adds windows and sinks, and each layer has its own base.
Source: transformers, models/granitemoe, granitemoeshared and granitemoe_swa, and conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.manifests.model import AttentionSpec, LayerSpec, RouterSpec, SharedSpec

from .decoder import DecoderParts, attention_of, count_layers, experts_of, read_windows
from .decoder_weights import DecoderNames
from .settings import Settings

_ROUTER = "block_sparse_moe.router.weight"
_STACKS = ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj")
_SHARED_STACK = ("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight")
NAMES = DecoderNames(
    routers=("block_sparse_moe.router.layer.weight", _ROUTER),
    loaded_router=_ROUTER,
    stacked=(("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"), _STACKS),
    shared_stack=_SHARED_STACK,
)
SWA_NAMES = DecoderNames(routers=(_ROUTER,), loaded_router=_ROUTER, stacked=(_STACKS,), shared_stack=_SHARED_STACK)
_WINDOW = 128  # used if config.json has no `sliding_window`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of GraniteMoE."""
    return _parts(settings, [_attention(settings)] * count_layers(settings), None)


def shared_parts(settings: Settings) -> DecoderParts:
    """Read the settings of GraniteMoE with a shared expert."""
    return _parts(settings, [_attention(settings)] * count_layers(settings), _shared(settings))


def swa_parts(settings: Settings) -> DecoderParts:
    """Read the settings of GraniteMoE with windows."""
    layers, window = count_layers(settings), settings.optional_integer("sliding_window") or _WINDOW
    attention = _attention(settings, sinks=True)
    windows = read_windows(settings, [window if layer % 4 else 0 for layer in range(layers)], window)
    attentions = [
        replace(_with_base(settings, attention, base), sliding_window=size)
        for size, base in zip(windows, _bases(settings, layers), strict=True)
    ]
    return _parts(settings, attentions, _shared(settings))


def _attention(settings: Settings, sinks: bool = False) -> AttentionSpec:
    return attention_of(
        settings,
        bias="all" if settings.boolean("attention_bias", False) else "none",
        scale=settings.number("attention_multiplier", 1.0),
        sinks=sinks,
    )


def _bases(settings: Settings, layers: int) -> Sequence[float | None]:
    """Return the rotary base of each layer, 0 for no rotation; None for that of all layers. Raises CheckpointError."""
    bases = settings.raw("layer_rope_theta")
    if bases is None:
        return [None] * layers
    are_numbers = isinstance(bases, list) and all(type(base) in (int, float) and base >= 0 for base in bases)
    if not are_numbers or len(bases) != layers:
        settings.fail("layer_rope_theta", f"{layers} numbers, 0 or larger")
    return [float(base) for base in bases]


def _with_base(settings: Settings, attention: AttentionSpec, base: float | None) -> AttentionSpec:
    """Return attention with another rotary base. Raises CheckpointError for a stretched embedding."""
    rope = attention.rope
    if base is None or rope is None or base == rope.theta:
        return attention
    if base and rope.frequencies:
        settings.fail("layer_rope_theta", "the base of all layers, because the rotary embedding is stretched")
    return replace(attention, rope=replace(rope, theta=base) if base else None)


def _shared(settings: Settings) -> SharedSpec | None:
    return (
        None
        if settings.raw("shared_intermediate_size") in (None, 0)
        else SharedSpec(settings.integer("shared_intermediate_size"))
    )


def _parts(settings: Settings, attentions: Sequence[AttentionSpec], shared: SharedSpec | None) -> DecoderParts:
    router = RouterSpec("softmax", renormalize=True)  # equals a softmax over the chosen experts
    experts = experts_of(settings, router, count=("num_local_experts",), width="intermediate_size")
    scales = {
        "embedding_scale": settings.number("embedding_multiplier", 1.0),
        "residual_scale": settings.number("residual_multiplier", 1.0),
        "logits_scale": 1.0 / settings.number("logits_scaling", 1.0),
    }
    return DecoderParts(tuple(LayerSpec(attention, experts, shared) for attention in attentions), scales)
