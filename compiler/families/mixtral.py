"""Mixtral: softmax router over all experts, top-k renormalised.

Source: transformers, models/mixtral/modeling_mixtral.py and conversion_mapping.py.
"""

from __future__ import annotations

from moec.manifests.model import ExpertsSpec, RouterSpec

from ..checkpoint import Checkpoint
from .decoder import MAX_EXPERTS_PER_LAYER, ExpertNames, LayerParts, attention_of, lower_family
from .lowering import Lowering
from .settings import Settings

_EXPERTS = ExpertNames("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})


def lower(checkpoint: Checkpoint) -> Lowering:
    """Translate a Mixtral checkpoint. Raises CheckpointError naming the key of config.json that stands against it."""
    return lower_family(checkpoint, "mixtral", _EXPERTS, _parts)


def _parts(settings: Settings) -> LayerParts:
    """What is the family's own in config.json."""
    attention = attention_of(settings, sliding_window=settings.optional_integer("sliding_window") or 0)
    experts = ExpertsSpec(
        count=settings.integer("num_local_experts", MAX_EXPERTS_PER_LAYER),
        top_k=settings.integer("num_experts_per_tok"),
        width=settings.integer("intermediate_size"),
        activation="silu",
        router=RouterSpec("softmax", renormalize=True),
    )
    return attention, experts
