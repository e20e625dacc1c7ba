"""The operations a model is made of, over weights in the packed format.

Each function runs in the C++ extension, on the best instruction set of this processor, or in numpy (`reference`) where
the extension is not installed. Scalar and vector kernels give the same bits, for any number of threads and any batch;
numpy differs in the last bits. The reference documents shapes, dtypes and errors of every function but
`experts_layer`, whose specification is the model that calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moec.manifests.quant import QuantSpec

from . import attention_layer, bound_layer, latent_layer, lookahead, packed_matrix, reference
from .expert_layers import experts_layer
from .extension import (
    MAX_THREADS,
    NUMPY,
    active,
    available,
    compiled,
    loaded,
    require,
    select,
    set_threads,
    threads,
)
from .packed_matrix import Bytes, Floats, Int32s, Int64s, check_array

__all__ = [
    "MAX_THREADS",
    "NUMPY",
    "AttentionLayer",
    "Expert",
    "LatentLayer",
    "PackedMatrix",
    "active",
    "attend",
    "attention",
    "available",
    "combine",
    "compiled",
    "dequantize_rows",
    "expert_ffn",
    "experts_layer",
    "experts_of_token",
    "largest",
    "layer_norm",
    "linear",
    "linears",
    "loaded",
    "require",
    "rms_norm",
    "rope",
    "route",
    "router_shares",
    "select",
    "set_threads",
    "store_kv",
    "threads",
]

_TERNARY_CODE = 243  # in the place of a bitwidth: values of a byte of five codes
_FLOAT_CODES = {"none": 0, "bfloat16": 1, "float16": 2, "mxfp4": 3}


class PackedMatrix(packed_matrix.PackedMatrix):
    """A weight matrix in layout `rows16`, over memory that somebody else owns.

    data: uint8[packed_bytes], kept by reference, never copied or written. Raises ValueError if the buffer does not
    have exactly the bytes of the format. Source: docs/format.md, Packing.
    """

    __slots__ = ("native",)

    def __init__(self, data: Bytes, rows: int, columns: int, spec: QuantSpec) -> None:
        super().__init__(data, rows, columns, spec)
        extension = loaded()
        bitwidth = _TERNARY_CODE if spec.is_ternary else int(spec.bitwidth)
        form = (bitwidth, spec.group_size, spec.symmetric, _FLOAT_CODES[spec.float_type], spec.byte_scales)
        self.native = extension.PackedMatrix(data, rows, columns, *form) if extension else None

    def move_to(self, data: Bytes) -> None:
        if self.native is None:
            super().move_to(data)
        else:  # which checks as much, in a tenth of the time
            self.native.move_to(data)
            self.data = data


class Expert(reference.Expert):
    """The projections of one expert, as `reference.Expert` takes and checks them, bound to the extension."""

    __slots__ = ("native",)

    def _bind(self) -> None:
        extension, code = loaded(), reference.ACTIVATIONS.index(self.activation)
        parts = [getattr(matrix, "native", None) for matrix in (self.gate, self.up, self.down)]  # no gate: None
        self.native = extension.Expert(*parts, code, self.limit, list(self.biases)) if extension else None

    def move_to(self, gate: Bytes | None, up: Bytes, down: Bytes) -> None:
        """The same expert in other memory, uint8[packed_bytes] each; no call may be computing with it.

        Raises ValueError if one is not as large as before.
        """
        for matrix, data in ((self.gate, gate), (self.up, up), (self.down, down)):
            if matrix is not None and data is not None:
                matrix.move_to(data)
        if self.native is not None:
            self.native.follow_matrices()


class AttentionLayer(attention_layer.AttentionLayer):
    """The weights that `attention_layer.AttentionLayer` describes, bound to the extension. Raises ValueError there."""

    def __post_init__(self) -> None:
        self.native = bound_layer.bind(self, loaded())


class LatentLayer(latent_layer.LatentLayer):
    """The same of `latent_layer.LatentLayer`."""

    def __post_init__(self) -> None:
        self.native = bound_layer.bind(self, loaded())


def linear(matrix: PackedMatrix, x: Floats, out: Floats) -> None:
    """out = x W^T. x: [T, K]; out: [T, N], written; they must not overlap. Raises ValueError."""
    native = compiled()
    if native is None:
        reference.linear(matrix, x, out)
    else:
        native.linears([matrix.native], x, [out])


def linears(matrices: Sequence[PackedMatrix], x: Floats, outs: Sequence[Floats]) -> None:
    """outs[i] = x W_i^T: the bits of `linear`, one matrix after the other, in one go.

    matrices: 1 to 8 of K columns; x: [T, K]; outs[i]: [T, N_i], written; nothing may overlap. Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.linears(matrices, x, outs)
    else:
        native.linears([matrix.native for matrix in matrices], x, list(outs))


def dequantize_rows(matrix: PackedMatrix, rows: Int64s, out: Floats) -> None:
    """out[i] = row rows[i] of the matrix. rows: int64[n]; out: [n, K], written. Raises ValueError."""
    native = compiled()
    if native is None:
        reference.dequantize_rows(matrix, rows, out)
    else:
        native.dequantize_rows(matrix.native, rows, out)


def expert_ffn(expert: Expert, x: Floats, tokens: Int32s, ranks: Int32s, out: Floats) -> None:
    """out[tokens[i], ranks[i]] = expert(x[tokens[i]]) for each i; nothing else is written.

    x: [T, D]; tokens, ranks: int32[n], no pair twice; out: [T, K, D]. x and out must not overlap. Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.expert_ffn(expert, x, tokens, ranks, out)
    else:
        native.expert_ffn(expert.native, x, tokens, ranks, out)


def experts_of_token(experts: Sequence[Expert], x: Floats, ranks: Int32s, out: Floats) -> None:
    """out[0, ranks[i]] = what experts[i] makes of the only token: all of them in one go, the bits of `expert_ffn`.

    x: [1, D]; ranks: int32[n], none twice; out: [1, K, D]. x and out must not overlap. Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.experts_of_token(experts, x, ranks, out)
    else:
        native.experts_of_token([expert.native for expert in experts], x, ranks, out)


def combine(parts: Floats, weights: Floats, out: Floats) -> None:
    """out[t] = sum over ranks, in order, of weights[t, k] * parts[t, k].

    parts: [T, K, D]; weights: [T, K]; out: [T, D], written. Raises ValueError.
    """
    (compiled() or reference).combine(parts, weights, out)


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """out = weight * (x / sqrt(mean(x^2) + eps)). x, out: [T, D]; weight: [D]. out may be x. Raises ValueError."""
    (compiled() or reference).rms_norm(x, weight, eps, out)


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None:
    """out = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, var over all D. x, out: [T, D]; weight, bias: [D].

    out may be x. Raises ValueError.
    """
    (compiled() or reference).layer_norm(x, weight, bias, eps, out)


def rope(x: Floats, cos: Floats, sin: Floats, positions: Int32s, interleaved: bool = False) -> None:
    """Rotate the first R features of each head in place, halves against each other, or neighbours if `interleaved`.

    x: [T, H, Dh]; cos, sin: [C, R / 2]; positions: int32[T]. Neighbours end in halves, see `reference.rope`. Raises
    ValueError.
    """
    (compiled() or reference).rope(x, cos, sin, positions, interleaved)


def store_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s) -> None:
    """Write keys and values of each token to its slot and position.

    k, v: [T, Hkv, Dh]; k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16; slots, positions: int32[T]. float16 holds
    the nearest value, the largest one where none is large enough. Raises ValueError.
    """
    (compiled() or reference).store_kv(k, v, k_cache, v_cache, slots, positions)


def attention(
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    slots: Int32s,
    positions: Int32s,
    scale: float,
    window: int,
    out: Floats,
    sinks: Floats | None = None,
    ends: Int32s | None = None,
    bias: Floats | None = None,
) -> None:
    """Attention of each token over the cache of its slot, with grouped heads, causal unless `ends` says otherwise.

    q, out: [T, H, Dh]; k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16, H a multiple of Hkv; slots, positions:
    int32[T].
    A token at position p sees positions max(0, p - window + 1) to p, from 0 if window is 0. Raises ValueError.
    sinks: [H], one more score per head that takes its share of the softmax and adds nothing. ends: int32[T], 1 to C, a
    token sees positions 0 to its end - 1 instead; window must be 0. bias: [H, 2 C - 1], added to the scaled score of
    position j seen from p at C - 1 + j - p.
    """
    kernels = compiled() or reference
    kernels.attention(q, k_cache, v_cache, slots, positions, scale, window, out, sinks, ends, bias)


def attend(
    layer: AttentionLayer | LatentLayer,
    hidden: Floats,
    k_cache: Floats,
    v_cache: Floats,
    slots: Int32s,
    positions: Int32s,
    ends: Int32s | None = None,
) -> None:
    """hidden += what the layer's attention makes of it: norm, products, cache and attention, the bits of its steps.

    hidden: [T, D]; the rest as in `attention`. Keys and values of the tokens are stored. Raises ValueError.
    """
    if compiled() is None:
        layer.attend_in_steps(reference, hidden, k_cache, v_cache, slots, positions, ends)
    else:
        layer.native.attend(hidden, k_cache, v_cache, slots, positions, ends)


def route(logits: Floats, top_k: int, renormalize: bool) -> tuple[Int32s, Floats]:
    """Softmax over all experts, then the top_k of each token, best first; equal logits: the lowest expert wins.

    logits: [T, E]. Returns experts int32[T, K] and weights float32[T, K]; rows sum to 1 if `renormalize`.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        return reference.route(logits, top_k, renormalize)
    check_array(logits, "logits", np.float32, 2)
    if not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"top_k: expected 1 to {logits.shape[1]}, found {top_k}")
    experts = np.empty((logits.shape[0], top_k), np.int32)
    weights = np.empty((logits.shape[0], top_k), np.float32)
    native.route(logits, renormalize, experts, weights)
    return experts, weights


def router_shares(
    matrices: Sequence[PackedMatrix],
    norms: Sequence[Floats],
    eps: float,
    x: Floats,
    out: Floats,
    biases: Sequence[Floats | None] = (),
) -> None:
    """What routers would give one token, each behind its own norm: see lookahead.router_shares. Raises ValueError."""
    native = compiled()
    if native is None:
        lookahead.router_shares(matrices, norms, eps, x, out, biases)
    else:
        native.router_shares([matrix.native for matrix in matrices], list(norms), eps, x, out, list(biases))


def largest(values: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    """Indices of the largest values, at most `count`, and these values, largest first; ties: lowest index first.

    values: floats [n]; what is no number comes last. Raises ValueError.
    """
    native = compiled()
    if native is None or values.dtype != np.float32:
        return lookahead.largest(values, count)
    found: tuple[list[int], list[float]] = native.largest(values, count)
    return found
