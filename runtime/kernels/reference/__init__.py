"""The numpy kernels: the meaning of every native kernel, and the kernels that run without the extension.

No threads, no instruction sets, no caching: a packed matrix (docs/format.md, Packing) is unpacked on each call.
Results do not depend on how many tokens are computed together.
"""

from .bfloat_products import bfloat_product, round_to_bfloat16
from .cached_attention import as_cached, attention, rope, store_kv
from .experts import (
    ACTIVATIONS,
    SWIGLU_SLOPE,
    Expert,
    combine,
    expert_ffn,
    experts_of_token,
    gated,
    route,
)
from .norms import layer_norm, rms_norm
from .products import dequantize_rows, linear, linear_of_bfloats, linears, round_activations

__all__ = [
    "ACTIVATIONS",
    "SWIGLU_SLOPE",
    "Expert",
    "as_cached",
    "attention",
    "bfloat_product",
    "combine",
    "dequantize_rows",
    "expert_ffn",
    "experts_of_token",
    "gated",
    "layer_norm",
    "linear",
    "linear_of_bfloats",
    "linears",
    "rms_norm",
    "rope",
    "round_activations",
    "round_to_bfloat16",
    "route",
    "store_kv",
]
