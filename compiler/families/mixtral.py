"""Mixtral: softmax router over all experts, top-k renormalised.

Source: transformers, models/mixtral/modeling_mixtral.py and conversion_mapping.py.
"""

from __future__ import annotations

from moec.manifests.model import RouterSpec

from .decoder import DecoderParts, alike, attention_of, experts_of
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    routers=("mlp.gate.weight", "block_sparse_moe.gate.weight"),
    experts="block_sparse_moe.experts.{expert}.{projection}.weight",
    projections=("w1", "w3", "w2"),
)


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    attention = attention_of(settings, sliding_window=settings.optional_integer("sliding_window") or 0)
    router = RouterSpec("softmax", renormalize=True)
    experts = experts_of(settings, router, count=("num_local_experts",), width="intermediate_size")
    return alike(settings, attention, experts)
