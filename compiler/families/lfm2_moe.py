"""LFM2-MoE: layers with a short convolution and layers with attention, sigmoid scores with a correction, plain layers.

Source: transformers, models/lfm2_moe and conversion_mapping.py; LFM2 Technical Report, section 2.
"""

from __future__ import annotations

from moec.manifests.model import ConvolutionSpec, RouterSpec

from .decoder import (
    DecoderParts,
    Mixer,
    attention_of,
    count_layers,
    experts_of,
    fixed,
    layers_of,
    read_kinds,
    with_corrections,
)
from .decoder_weights import DecoderNames
from .settings import Settings

NAMES = DecoderNames(
    routers=("feed_forward.gate.weight",),
    loaded_router="feed_forward.gate.weight",
    experts="feed_forward.experts.{expert}.{projection}.weight",
    projections=("w1", "w3", "w2"),
    stacked=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
    corrections=("feed_forward.expert_bias",),
    plain=("feed_forward.w1.weight", "feed_forward.w3.weight", "feed_forward.w2.weight"),
    own={
        "final_norm": "model.embedding_norm.weight",
        "attention_norm": "operator_norm.weight",
        "experts_norm": "ffn_norm.weight",
        "query_norm": "self_attn.q_layernorm.weight",
        "key_norm": "self_attn.k_layernorm.weight",
        "output": "self_attn.out_proj.weight",
    },
    recurrent={"input": "conv.in_proj.weight", "taps": "conv.conv.weight", "output": "conv.out_proj.weight"},
)
_LEAST_SUM = 1e-6  # fixed in the modeling code


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over("conv_dim", "conv_dim_out")  # transformers takes the hidden size
    fixed(settings, "conv_bias", False)
    renormalize = settings.boolean("norm_topk_prob", True)
    router = RouterSpec(
        "sigmoid",
        renormalize=renormalize,
        scale=settings.number("routed_scaling_factor", 1.0),
        least_sum=_LEAST_SUM if renormalize else 0.0,
    )
    experts = experts_of(settings, router, count=("num_experts",))
    layers, plain = count_layers(settings), settings.raw("num_dense_layers")
    plain = 2 if plain is None else plain
    if type(plain) is not int or not 0 <= plain < layers:
        settings.fail("num_dense_layers", f"fewer layers than the {layers} there are")
    kinds = read_kinds(settings, "layer_types", ("conv", "full_attention"))
    if kinds is None:
        settings.fail("layer_types", f"{layers} times `conv` or `full_attention`")
    taps = settings.optional_integer("conv_L_cache", absent=3) or 3
    mixers: dict[str, Mixer] = {
        "conv": ConvolutionSpec(taps),
        "full_attention": attention_of(settings, query_key_norm="head"),
    }
    are_routed = [layer >= plain for layer in range(layers)]
    specs = layers_of(settings, [mixers[kind] for kind in kinds], experts, None, are_routed)
    if settings.boolean("use_expert_bias", True):
        specs = with_corrections(settings, NAMES, specs)
    ties = settings.boolean("tie_embedding", True)
    return DecoderParts(specs, {"norm_eps": settings.number("norm_eps", 1e-5)}, ties=ties, has_activation=False)
