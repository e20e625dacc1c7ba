"""The numpy kernels: the meaning of every native kernel, and the kernels that run without the extension.

No threads, no instruction sets, no caching: a packed matrix (docs/format.md, Packing) is unpacked on each call.
Results do not depend on how many tokens are computed together.
"""

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
from .products import dequantize_rows, linear, linears, round_activations

__all__ = [
    "ACTIVATIONS",
    "SWIGLU_SLOPE",
    "Expert",
    "as_cached",
    "attention",
    "combine",
    "dequantize_rows",
    "expert_ffn",
    "experts_of_token",
    "gated",
    "layer_norm",
    "linear",
    "linears",
    "rms_norm",
    "rope",
    "round_activations",
    "route",
    "store_kv",
]
