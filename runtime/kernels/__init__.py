"""The operations of a model, on weights in the packed format.

Each function runs in the C++ extension, on the best instruction set of this processor. Without the extension it runs
in numpy (`reference`). Scalar and vector kernels give the same bits, for any number of threads and any batch. numpy
differs in the last bits. `reference` documents shapes, dtypes and errors. The exception is `experts_layer`: its
specification is the model that calls it. `native/README.md` says which file of the extension does what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moec.manifests.quant import QuantSpec

from . import attention_layer, latent_layer, lookahead, packed_matrix, recurrent_layers, reference
from .extension import (
    MAX_THREADS,
    NUMPY,
    active,
    available,
    bfloat_kernels,
    compiled,
    loaded,
    select,
    set_threads,
    threads,
)
from .packed_matrix import Bytes, Floats, Int32s, Int64s, check_array
from .stream_layer import AttentionRule, StreamLayer, TokenPlaces

__all__ = [
    "MAX_THREADS",
    "NUMPY",
    "AttentionLayer",
    "AttentionRule",
    "ConvolutionLayer",
    "DeltaLayer",
    "Expert",
    "LatentLayer",
    "PackedMatrix",
    "TokenPlaces",
    "active",
    "attend",
    "attention",
    "available",
    "bfloat_kernels",
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
    "mix",
    "rms_norm",
    "rope",
    "route",
    "router_shares",
    "select",
    "set_threads",
    "store_kv",
    "threads",
]

_TERNARY_CODE = 243  # stands for a bitwidth: a byte of five codes has 243 values
_FLOAT_CODES = {"none": 0, "bfloat16": 1, "float16": 2, "mxfp4": 3}


class PackedMatrix(packed_matrix.PackedMatrix):
    """A weight matrix in layout `rows16`, bound to the extension. The caller owns the memory.

    data: uint8[packed_bytes], kept by reference, never copied or written.
    Raises ValueError if the buffer does not have exactly the bytes of the format.
    Source: docs/format.md, Packing.
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
        else:  # the extension makes the same checks in a tenth of the time
            self.native.move_to(data)
            self.data = data


class Expert(reference.Expert):
    """The projections of one expert, bound to the extension. Arguments and checks: `reference.Expert`.

    Raises ValueError also if it reads bfloat16 activations and the kernels in use have no such products.
    """

    __slots__ = ("native",)

    def _bind(self) -> None:
        extension, code = loaded(), reference.ACTIVATIONS.index(self.activation)
        parts = [getattr(matrix, "native", None) for matrix in (self.gate, self.up, self.down)]  # no gate: None
        options = (code, self.limit, list(self.biases), self.reads_bfloats)
        self.native = extension.Expert(*parts, *options) if extension else None

    def move_to(self, gate: Bytes | None, up: Bytes, down: Bytes) -> None:
        """Use other memory for the same weights. No call may be computing with this expert.

        gate, up, down: uint8[packed_bytes]. None: the expert has no gate.
        Raises ValueError if the size of one of them differs from before.
        """
        for matrix, data in ((self.gate, gate), (self.up, up), (self.down, down)):
            if matrix is not None and data is not None:
                matrix.move_to(data)
        if self.native is not None:
            self.native.follow_matrices()


class AttentionLayer(attention_layer.AttentionLayer):
    """Weights of grouped attention, bound to the extension. Fields: `attention_layer.AttentionLayer`.

    Raises ValueError if their shapes do not fit each other.
    """

    def __post_init__(self) -> None:
        self.native = _bound(self)


class LatentLayer(latent_layer.LatentLayer):
    """Weights of latent attention, bound to the extension. Fields: `latent_layer.LatentLayer`.

    Raises ValueError if their shapes do not fit each other.
    """

    def __post_init__(self) -> None:
        self.native = _bound(self)


class ConvolutionLayer(recurrent_layers.ConvolutionLayer):
    """Weights of a short convolution, bound to the extension. Fields: `recurrent_layers.ConvolutionLayer`.

    Raises ValueError if their shapes do not fit each other.
    """

    def __post_init__(self) -> None:
        self.native = _bound(self)


class DeltaLayer(recurrent_layers.DeltaLayer):
    """Weights of the gated delta rule, bound to the extension. Fields: `recurrent_layers.DeltaLayer`.

    Raises ValueError if their shapes do not fit each other.
    """

    def __post_init__(self) -> None:
        self.native = _bound(self)


def linear(matrix: PackedMatrix, x: Floats, out: Floats) -> None:
    """Multiply: out = x W^T. x and out must not overlap.

    x: [T, K].
    out: [T, N], written.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.linear(matrix, x, out)
    else:
        native.linears([matrix.native], x, [out])


def linears(matrices: Sequence[PackedMatrix], x: Floats, outs: Sequence[Floats]) -> None:
    """Multiply one input with several matrices: outs[i] = x W_i^T, with the bits of `linear`. No arrays may overlap.

    matrices: 1 to 8, with K columns each.
    x: [T, K].
    outs: one [T, N_i] per matrix, written.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.linears(matrices, x, outs)
    else:
        native.linears([matrix.native for matrix in matrices], x, list(outs))


def dequantize_rows(matrix: PackedMatrix, rows: Int64s, out: Floats) -> None:
    """Dequantize rows: out[i] = row rows[i] of the matrix.

    rows: int64[n].
    out: [n, K], written.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.dequantize_rows(matrix, rows, out)
    else:
        native.dequantize_rows(matrix.native, rows, out)


def expert_ffn(expert: Expert, x: Floats, tokens: Int32s, ranks: Int32s, out: Floats) -> None:
    """Compute one expert: out[tokens[i], ranks[i]] = expert(x[tokens[i]]) for each i. x and out must not overlap.

    x: [T, D].
    tokens, ranks: int32[n], no pair twice.
    out: [T, K, D], written at these places only.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.expert_ffn(expert, x, tokens, ranks, out)
    else:
        native.expert_ffn(expert.native, x, tokens, ranks, out)


def experts_of_token(experts: Sequence[Expert], x: Floats, ranks: Int32s, out: Floats) -> None:
    """Compute several experts for one token: out[0, ranks[i]] = experts[i](x[0]), with the bits of `expert_ffn`.

    x: [1, D]; x and out must not overlap.
    ranks: int32[n], none twice.
    out: [1, K, D], written at these ranks only.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.experts_of_token(experts, x, ranks, out)
    else:
        native.experts_of_token([expert.native for expert in experts], x, ranks, out)


def combine(parts: Floats, weights: Floats, out: Floats) -> None:
    """Add the parts of each token: out[t] = sum over ranks, in order, of weights[t, k] * parts[t, k].

    parts: [T, K, D].
    weights: [T, K].
    out: [T, D], written.
    Raises ValueError.
    """
    (compiled() or reference).combine(parts, weights, out)


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Apply an RMS norm: out = weight * (x / sqrt(mean(x^2) + eps)).

    x, out: [T, D]; out may be x.
    weight: [D].
    Raises ValueError.
    """
    (compiled() or reference).rms_norm(x, weight, eps, out)


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None:
    """Apply a layer norm: out = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, with the variance over all D.

    x, out: [T, D]; out may be x.
    weight, bias: [D].
    Raises ValueError.
    """
    (compiled() or reference).layer_norm(x, weight, bias, eps, out)


def rope(x: Floats, cos: Floats, sin: Floats, positions: Int32s, interleaved: bool = False) -> None:
    """Rotate the first R features of each head in place: pairs of features from the two halves, or adjacent pairs.

    x: [T, H, Dh].
    cos, sin: [C, R / 2].
    positions: int32[T].
    interleaved: the pairs are adjacent features. They are moved into halves and stay there, see `reference.rope`.
    Raises ValueError.
    """
    (compiled() or reference).rope(x, cos, sin, positions, interleaved)


def store_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s) -> None:
    """Write the keys and values of each token to its slot and position.

    k, v: [T, Hkv, Dh].
    k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16. float16 gets the nearest value, at most the largest one.
    slots, positions: int32[T].
    Raises ValueError.
    """
    (compiled() or reference).store_kv(k, v, k_cache, v_cache, slots, positions)


def attention(
    q: Floats, k_cache: Floats, v_cache: Floats, places: TokenPlaces, rule: AttentionRule, out: Floats
) -> None:
    """Compute attention of each token over the cache of its slot, with grouped heads.

    q: [T, H, Dh], H a multiple of Hkv.
    k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16.
    out: [T, H, Dh], written.
    Raises ValueError.
    """
    native = compiled()
    if native is None:
        reference.attention(q, k_cache, v_cache, places, rule, out)
    else:
        native.attention(
            q,
            k_cache,
            v_cache,
            places.slots,
            places.positions,
            rule.scale,
            rule.window,
            out,
            rule.sinks,
            places.ends,
            rule.bias,
        )


def attend(
    layer: AttentionLayer | LatentLayer, hidden: Floats, state: Sequence[np.ndarray], places: TokenPlaces
) -> None:
    """Add a layer's attention to the residual stream: norm, products, cache, attention, output.

    The bits are those of the single steps. The keys and values of the tokens are stored in the cache.
    hidden: [T, D], read and written.
    state: keys and values, [S, cache heads, C, cache size] each, float32 or float16.
    Raises ValueError.
    """
    if compiled() is None:
        layer.mix_in_steps(reference, hidden, state, places)
    else:
        layer.native.attend(hidden, *state, places.slots, places.positions, places.ends)


def mix(layer: ConvolutionLayer | DeltaLayer, hidden: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> None:
    """Add the output of a layer with a recurrent state to the residual stream.

    The bits of a token depend on the tokens before it in its slot alone, not on how a text is split into passes.
    hidden: [T, D], read and written. The tokens of a slot are adjacent and in order.
    state: live and kept arrays of each part, and `kept_at`, as in `layers.recurrent_states`; written.
    Raises ValueError.
    """
    if compiled() is None:
        layer.mix_in_steps(reference, hidden, state, places)
    else:
        layer.native.mix(hidden, *state, places.slots, places.positions)


def experts_layer(
    layers: Any, layer: int, hidden: Floats, sequences: int = 1, slots: np.ndarray | None = None
) -> tuple[str, int, int, int, int, int, int]:
    """Add the output of a layer's experts to the hidden states of T tokens. Waits for experts that are not in memory.

    The specification is `Model._experts_layer` in runtime/model/forward.py. There is no numpy version.
    layers: the extension's `ExpertLayers`.
    hidden: [T, D], read and written.
    sequences: number of sequences that the tokens belong to.
    slots: slot of each token, int32 [T]. Experts with a capacity need it.
    Raises ValueError.

    Returns seven values:
    1. How it ended: `done`, `failed`, `too large` or `closed`.
    2. The expert that stopped it.
    3. Nanoseconds in norm, router and shared expert.
    4. Nanoseconds in routed experts.
    5. Nanoseconds in the shared expert alone.
    6. How many different experts were chosen.
    7. How many of them had been predicted; -1 without a prediction.
    """
    outcome: tuple[str, int, int, int, int, int, int] = layers.run(layer, hidden, sequences, slots)
    return outcome


def route(logits: Floats, top_k: int, renormalize: bool) -> tuple[Int32s, Floats]:
    """Choose experts: softmax over all experts, then the top_k of each token, best first.

    Of equal logits the lowest expert wins.
    logits: [T, E].
    renormalize: make the weights of each token sum to 1.
    Returns experts int32[T, K] and weights float32[T, K].
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
    """Compute the expert shares of several routers for one token. Arguments: `lookahead.router_shares`.

    Raises ValueError.
    """
    native = compiled()
    if native is None:
        lookahead.router_shares(matrices, norms, eps, x, out, biases)
    else:
        native.router_shares([matrix.native for matrix in matrices], list(norms), eps, x, out, list(biases))


def largest(values: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    """Return the indices of the `count` largest values, and these values, largest first.

    Of equal values the lowest index comes first; NaN comes last.
    values: floats [n].
    Raises ValueError.
    """
    native = compiled()
    if native is None or values.dtype != np.float32:
        return lookahead.largest(values, count)
    indices_and_values: tuple[list[int], list[float]] = native.largest(values, count)
    return indices_and_values


def _bound(layer: StreamLayer) -> Any:
    """Return the extension's object for this layer, from the class of the same name; None without an extension.

    Raises ValueError if shapes do not fit each other.
    """
    extension = loaded()
    if extension is None:
        return None
    fields = {name: _extension_form(value) for name, value in vars(layer).items()}
    fields["norm"] = (fields["norm"], fields.pop("norm_bias"), fields.pop("after_norm"))
    return getattr(extension, type(layer).__name__)(**fields)


def _extension_form(value: Any) -> Any:
    """Replace matrices, alone or in a tuple, by the extension's objects. Other values stay."""
    return (
        tuple(_extension_form(item) for item in value) if isinstance(value, tuple) else getattr(value, "native", value)
    )
