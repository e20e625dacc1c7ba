"""GraniteMoE: softmax over the chosen experts, stacked experts on disk, multipliers of embeddings and residuals.

Source: transformers, models/granitemoe/modeling_granitemoe.py and conversion_mapping.py.
"""

from __future__ import annotations

from moec.manifests.model import RouterSpec

from .decoder import DecoderParts, alike, attention_of, experts_of
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    routers=("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    loaded_router="block_sparse_moe.router.weight",
    stacked=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    attention = attention_of(
        settings,
        bias="all" if settings.boolean("attention_bias", False) else "none",
        scale=settings.number("attention_multiplier", 1.0),
    )
    router = RouterSpec("softmax", renormalize=True)  # equals a softmax over the chosen experts
    experts = experts_of(settings, router, count=("num_local_experts",), width="intermediate_size")
    scales = {
        "embedding_scale": settings.number("embedding_multiplier", 1.0),
        "residual_scale": settings.number("residual_multiplier", 1.0),
        "logits_scale": 1.0 / settings.number("logits_scaling", 1.0),
    }
    return DecoderParts(alike(settings, attention, experts).layers, scales)
