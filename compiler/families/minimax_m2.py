"""MiniMax-M2: norms over all heads of queries and keys, a part of each head rotates, sigmoid scores with a correction.

Source: transformers, models/minimax_m2 and conversion_mapping.py.
"""

from __future__ import annotations

from moec.manifests.model import RouterSpec

from .decoder import DecoderParts, alike, attention_of, experts_of, fixed, with_corrections
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    routers=("block_sparse_moe.gate.weight", "mlp.gate.weight"),
    experts="block_sparse_moe.experts.{expert}.{projection}.weight",
    projections=("w1", "w3", "w2"),
    corrections=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
)
# Keys of the published configuration that transformers does not read, with the values for which it computes the same.
_FIXED = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
_PASSED_OVER = (
    "auto_map", "attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta",
    "layernorm_mlp_beta", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp",
    "shared_moe_mode",
)  # fmt: skip


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over(*_PASSED_OVER)
    for key, value in _FIXED.items():
        fixed(settings, key, value)
    fixed(settings, "shared_intermediate_size", 0)
    head_size, rotary = settings.integer("head_dim"), settings.optional_integer("rotary_dim")
    attention = attention_of(settings, rope_share=(rotary or head_size) / head_size, query_key_norm="full")
    router = RouterSpec("sigmoid", renormalize=True)
    experts = experts_of(settings, router, count=("num_local_experts", "num_experts"), width="intermediate_size")
    return DecoderParts(with_corrections(settings, NAMES, alike(settings, attention, experts).layers))
