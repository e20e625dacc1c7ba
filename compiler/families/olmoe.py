"""OLMoE: queries and keys normed over their full width, softmax router over all experts, top-k not renormalised.

Source: transformers, models/olmoe/modeling_olmoe.py; OLMoE: Open Mixture-of-Experts Language Models, section 2.
"""

from __future__ import annotations

from moec.manifests.model import RouterSpec

from .decoder import DecoderParts, alike, attention_of, experts_of
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames()


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    if settings.raw("clip_qkv") is not None:
        settings.fail("clip_qkv", "null", "compile a checkpoint that does not clip queries, keys and values")
    attention = attention_of(settings, query_key_norm="full")
    hidden, heads = settings.integer("hidden_size"), attention.num_heads
    if attention.head_size * heads != hidden:
        settings.fail("head_dim", f"hidden_size {hidden} divided by {heads} heads, the width that the norms have")
    router = RouterSpec("softmax", renormalize=settings.boolean("norm_topk_prob", False))
    experts = experts_of(settings, router, count=("num_experts",), width="intermediate_size")
    return alike(settings, attention, experts)
