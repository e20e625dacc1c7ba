"""MiniCPM-MoE: Llama's attention, Mixtral's experts, scales of embeddings, residuals and logits.

Source: MiniCPM, section 3 and appendix A.1. docs/families.md lists the facts that come from other implementations.
"""

from __future__ import annotations

import math

from moec.manifests.model import RouterSpec

from .decoder import DecoderParts, alike, attention_of, count_layers, experts_of
from .decoder_weights import DecoderNames
from .rope import read_early_rope
from .settings import Settings

NAMES = DecoderNames(
    loaded_router="block_sparse_moe.router.weight",
    experts="mlp.experts.{expert}.{projection}.weight",
    projections=("w1", "w3", "w2"),
    stacked=(),
)


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over("auto_map", "pretraining_tp")
    router = RouterSpec("softmax", renormalize=True)
    experts = experts_of(settings, router, count=("num_experts",), width="intermediate_size")
    # No defaults, because releases of the configuration class have different ones.
    scales = {
        "embedding_scale": settings.number("scale_emb"),
        "residual_scale": settings.number("scale_depth") / math.sqrt(count_layers(settings)),
        "logits_scale": settings.number("dim_model_base") / settings.integer("hidden_size"),
    }
    # Last, because a stretched rotary embedding reads the stand-in's configuration, which needs the keys above.
    attention = attention_of(settings, rope=read_early_rope)
    return DecoderParts(alike(settings, attention, experts).layers, scales, ties=True)
