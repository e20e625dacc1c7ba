"""Qwen3-MoE: queries and keys normed head by head, heads of a size of their own, softmax router over all experts.

Source: transformers, models/qwen3_moe/modeling_qwen3_moe.py and configuration_qwen3_moe.py.
"""

from __future__ import annotations

from moec.manifests.model import ExpertsSpec, RouterSpec

from ..checkpoint import Checkpoint
from .decoder import MAX_EXPERTS_PER_LAYER, ExpertNames, LayerParts, attention_of, lower_family
from .lowering import Lowering
from .settings import Settings

_EXPERTS = ExpertNames("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


def lower(checkpoint: Checkpoint) -> Lowering:
    """Translate a Qwen3-MoE checkpoint. Raises CheckpointError naming the key of config.json that stands against it."""
    return lower_family(checkpoint, "qwen3_moe", _EXPERTS, _parts)


def _parts(settings: Settings) -> LayerParts:
    """What is the family's own in config.json."""
    _require_routed_layers(settings)
    window = settings.optional_integer("sliding_window") or 0
    attention = attention_of(
        settings,
        sliding_window=window if settings.boolean("use_sliding_window", False) else 0,
        query_key_norm="head",
    )
    experts = ExpertsSpec(
        count=settings.either_integer("num_experts", "num_local_experts", MAX_EXPERTS_PER_LAYER),
        top_k=settings.integer("num_experts_per_tok"),
        width=settings.integer("moe_intermediate_size"),
        activation="silu",
        router=RouterSpec("softmax", renormalize=settings.boolean("norm_topk_prob", False)),
    )
    return attention, experts


def _require_routed_layers(settings: Settings) -> None:
    """Refuse models with plain layers in between; what only those would use is read and left."""
    remedy = "compile a checkpoint whose layers all hold experts"
    if settings.raw("mlp_only_layers") not in (None, []):
        settings.fail("mlp_only_layers", "an empty list", remedy)
    if settings.raw("decoder_sparse_step") not in (None, 1):
        settings.fail("decoder_sparse_step", "1", remedy)
    settings.raw("intermediate_size")  # of plain layers
    settings.raw("max_window_layers")  # transformers' model does not read it
