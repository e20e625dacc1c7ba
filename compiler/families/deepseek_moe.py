"""DeepSeekMoE-16B: Llama's attention, plain layers first, softmax router, shared experts without a gate.

Source: DeepSeekMoE, sections 3.1 and 3.2; the configuration published with deepseek-moe-16b. docs/families.md lists
the facts that come from other implementations.
"""

from __future__ import annotations

from moec.manifests.model import LayerSpec, RouterSpec

from .decoder import (
    DecoderParts,
    attention_of,
    count_layers,
    experts_of,
    first_routed,
    fixed,
    plain_layer,
    shared_width,
)
from .decoder_weights import DecoderNames
from .deepseek import SHARED_EXPERTS, TRAINING
from .rope import read_early_rope
from .settings import Settings

NAMES = DecoderNames(stacked=(), loaded_shared="mlp.shared_expert")


def parts(settings: Settings) -> DecoderParts:
    """Read the settings of this family."""
    settings.passed_over(*TRAINING)
    fixed(settings, "scoring_func", "softmax")
    top_k = settings.integer("num_experts_per_tok")
    # With top_k 1 the expert keeps its softmax share, whatever the key says.
    router = RouterSpec("softmax", renormalize=settings.boolean("norm_topk_prob", False) and top_k > 1)
    experts = experts_of(settings, router, count=("n_routed_experts",))
    attention = attention_of(settings, rope=read_early_rope)
    routed = LayerSpec(attention, experts, shared_width(settings, SHARED_EXPERTS, experts.width, absent=0))
    plain = plain_layer(attention, settings.integer("intermediate_size"))
    first, step = first_routed(settings, default=0), settings.optional_integer("moe_layer_freq") or 1
    layers = range(count_layers(settings))
    return DecoderParts(tuple(routed if at >= first and at % step == 0 else plain for at in layers))
