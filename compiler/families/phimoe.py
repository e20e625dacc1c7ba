"""Phi-3.5-MoE: layer norms, routing by sparsemixer, biases, rotary embeddings with a short and a long form.

Source: transformers, models/phimoe/modeling_phimoe.py and conversion_mapping.py; GRIN, SparseMixer-v2.
"""

from __future__ import annotations

from moec.manifests.model import RouterSpec

from .decoder import DecoderParts, alike, attention_of, experts_of
from .decoder_weights import DecoderNames
from .longrope import read_longrope
from .settings import Settings

NAMES = DecoderNames(
    routers=("block_sparse_moe.gate.weight", "mlp.router.weight"),
    loaded_router="mlp.router.weight",
    experts="block_sparse_moe.experts.{expert}.{projection}.weight",
    projections=("w1", "w3", "w2"),
)
_TOP_K = 2  # sparsemixer makes exactly two choices
_JITTER = 0.01  # used if config.json has no `router_jitter_noise`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    # Noise and dropout are for training. transformers now has the classes that `auto_map` names.
    settings.passed_over("input_jitter_noise", "hidden_dropout", "auto_map")
    if settings.integer("num_experts_per_tok") != _TOP_K:
        settings.fail("num_experts_per_tok", f"{_TOP_K}, which sparsemixer chooses", "compile another checkpoint")
    attention = attention_of(
        settings,
        rope=read_longrope,
        sliding_window=settings.optional_integer("sliding_window") or 0,
        bias="all" if settings.boolean("attention_bias", False) else "none",
    )
    router = RouterSpec("sparsemixer", renormalize=False, margin=2 * _jitter(settings))
    experts = experts_of(settings, router, count=("num_local_experts",), width="intermediate_size")
    more = {"norm": "layer", "has_head_bias": settings.boolean("lm_head_bias", False)}
    return DecoderParts(alike(settings, attention, experts).layers, more)


def _jitter(settings: Settings) -> float:
    """Return half of the share by which a logit may be below the largest and still count.

    0: only logits equal to the largest count.
    Raises CheckpointError.
    """
    value = settings.raw("router_jitter_noise")
    if value is None:
        return _JITTER
    if type(value) not in (int, float) or not 0 <= value < 1:
        settings.fail("router_jitter_noise", "a number from 0 to below 1")
    return float(value)
