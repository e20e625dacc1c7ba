"""Kolibri-1: norms before and after, a correction of the router's logits, no positions in layers without a window.

Source: transformers, models/kolibri1/modeling_kolibri1.py, configuration_kolibri1.py and conversion_mapping.py.
"""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import RouterSpec, SharedSpec

from .decoder import DecoderParts, attention_of, count_layers, experts_of, layers_of, read_windows, with_corrections
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    corrections=("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    own={
        "attention_after_norm": "post_self_attn_layernorm.weight",
        "experts_after_norm": "post_mlp_layernorm.weight",
    },
    renamed={
        "attention_after_norm": "post_attn_norm.weight",
        "experts_after_norm": "post_ffn_norm.weight",
    },
)
_PERIOD = 5  # used if config.json has no `layer_types`


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    layers, window = count_layers(settings), settings.integer("sliding_window")
    rotated = attention_of(settings, sliding_window=window, query_key_norm="head")
    full = replace(rotated, rope=None, sliding_window=0)
    usual = [window if (layer + 1) % _PERIOD else 0 for layer in range(layers)]
    attentions = [rotated if size else full for size in read_windows(settings, usual, window)]
    router = RouterSpec("sigmoid", renormalize=settings.boolean("norm_topk_prob", False))
    experts = experts_of(settings, router, count=("num_experts", "num_local_experts"))
    shared = SharedSpec(settings.integer("shared_expert_intermediate_size"))
    corrected = with_corrections(settings, NAMES, layers_of(settings, attentions, experts, shared, [True] * layers))
    return DecoderParts(
        tuple(
            replace(
                layer,
                norms_after=True,
                experts=replace(layer.experts, router=replace(layer.experts.router, corrects_logits=True)),
            )
            for layer in corrected
        )
    )
