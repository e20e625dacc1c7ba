"""The numpy kernels: the meaning of every native kernel, and the kernels that run without the extension.

No threads, no instruction sets, no caching: a packed matrix (docs/format.md, Packing) is unpacked on each call.
Results do not depend on how many tokens are computed together.

Shape letters:
T tokens, N rows, K columns or ranks, D hidden, F expert width, E experts.
H heads, Hkv heads of keys and values, Dh head size, R rotated features of a head.
S slots, C cache positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moec.manifests.quant import COLUMNS_PER_TILE

from .packed_matrix import (
    Floats,
    Int32s,
    Int64s,
    PackedMatrix,
    check_array,
    check_indices,
    check_shape,
    require,
    unpack,
)

ACTIVATIONS = ("silu", "clamped_swiglu", "relu")
SWIGLU_SLOPE = np.float32(1.702)
_SMALLEST_ROUNDED = np.float32(2.0**-110)  # largest value of a tile; 127 divided by less could overflow


class Expert:
    """The projections of one expert: down(activation(gate x) * (up x)), each product plus its bias.

    gate, up: F x D. gate is None with relu.
    down: D x F.
    activation: one of ACTIVATIONS, see `gated`. relu: down(max(up x, 0)), without biases.
    limit: of clamped_swiglu.
    biases: none, or float32 [F], [F], [D].
    Raises ValueError if the shapes do not fit or the activation is unknown.
    """

    __slots__ = ("activation", "biases", "down", "gate", "limit", "up")

    def __init__(
        self,
        gate: PackedMatrix | None,
        up: PackedMatrix,
        down: PackedMatrix,
        activation: str = "silu",
        limit: float = 0.0,
        biases: Sequence[Floats] = (),
    ) -> None:
        is_right = (gate is None) == (activation == "relu") and not (gate is None and biases)
        require(is_right, "gate: expected a matrix, or None and no biases with the activation relu")
        first = up if gate is None else gate
        fits = (first.rows, first.columns) == (up.rows, up.columns) == (down.columns, down.rows)
        shapes = ", ".join(f"{matrix.rows} x {matrix.columns}" for matrix in (first, up, down))
        require(fits, f"gate, up and down: expected F x D, F x D and D x F, found {shapes}")
        require(activation in ACTIVATIONS, f"activation: expected one of {ACTIVATIONS}, found `{activation}`")
        self.gate = gate
        self.up = up
        self.down = down
        require(len(biases) in (0, 3), f"biases: expected none or three, found {len(biases)}")
        for bias, matrix in zip(biases, (first, up, down), strict=False):
            check_array(bias, "bias", np.float32, 1)
            check_shape(bias, "bias", (matrix.rows,))
        self.activation = activation
        self.limit = limit
        self.biases = tuple(biases)
        self._bind()

    def _bind(self) -> None:
        """Make the form that other kernels keep; numpy needs none."""


def _weights(matrix: PackedMatrix) -> Floats:
    return unpack(matrix.data, matrix.rows, matrix.columns, matrix.spec)


def round_activations(x: Floats) -> Floats:
    """Round activations to 8 bits per tile of 32 columns, as quantized matrices read them. Returns codes times steps.

    x: [T, K], K a multiple of 32.
    step = max |x| / 127 of the tile; code = x * (127 / max |x|), to nearest even.
    A tile becomes zero if all its magnitudes are below 2^-110, and NaN if a value is not finite.
    """
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // COLUMNS_PER_TILE, COLUMNS_PER_TILE)
    largest = np.abs(tiles).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(largest >= _SMALLEST_ROUNDED, np.float32(127) / largest, np.float32(0))
        codes = np.rint(np.clip(tiles * inverse, -127, 127))
        rounded = codes * (np.where(np.isfinite(largest), largest, np.float32(np.nan)) / np.float32(127))
    return np.asarray(rounded, np.float32).reshape(x.shape)


def _inputs(matrix: PackedMatrix, x: Floats) -> Floats:
    return x if matrix.spec.bitwidth == 16 else round_activations(x)


def _product(weights: Floats, x: Floats, out: Floats) -> None:
    for row, target in zip(x, out, strict=True):
        target[:] = weights @ row  # token by token, so that the sums do not depend on the batch


def linear(matrix: PackedMatrix, x: Floats, out: Floats) -> None:
    """Multiply: out = x W^T. A quantized matrix reads x rounded to 8 bits (`round_activations`).

    x: [T, K].
    out: [T, N], written.
    Raises ValueError for wrong shapes.
    """
    check_array(x, "x", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    check_shape(x, "x", (x.shape[0], matrix.columns))
    check_shape(out, "out", (x.shape[0], matrix.rows))
    _product(_weights(matrix), _inputs(matrix, x), out)


def linears(matrices: Sequence[PackedMatrix], x: Floats, outs: Sequence[Floats]) -> None:
    """Multiply one input with several matrices: outs[i] = x W_i^T.

    matrices: 1 to 8, with K columns each.
    x: [T, K].
    outs: one [T, N_i] per matrix, written.
    Raises ValueError.
    """
    require(0 < len(matrices) <= 8 and len(outs) == len(matrices), "matrices: expected 1 to 8 and as many outputs")
    for matrix, out in zip(matrices, outs, strict=True):
        linear(matrix, x, out)


def dequantize_rows(matrix: PackedMatrix, rows: Int64s, out: Floats) -> None:
    """Dequantize rows: out[i] = row rows[i] of the matrix.

    rows: int64[n].
    out: [n, K], written.
    Raises ValueError.
    """
    check_array(rows, "rows", np.int64, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(out, "out", (rows.size, matrix.columns))
    check_indices(rows, "rows", matrix.rows)
    out[:] = _weights(matrix)[rows]


def silu(x: Floats) -> Floats:
    """Return x / (1 + exp(-x)), float32; never NaN for finite x."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.divide(x, np.float32(1) + np.exp(-x), dtype=np.float32))


def gated(gate: Floats, up: Floats, activation: str, limit: float) -> Floats:
    """Return the input of the down projection.

    silu: silu(gate) * up.
    relu: max(up, 0), without a gate.
    clamped_swiglu: (u + 1) g / (1 + exp(-1.702 g)), g = min(gate, limit), u = up within +-limit.
    Source: gpt-oss model card, section 2.
    """
    if activation == "silu":
        return silu(gate) * up
    if activation == "relu":
        return np.asarray(np.maximum(up, np.float32(0)), np.float32)
    bound = np.float32(limit)
    g, u = np.minimum(gate, bound), np.clip(up, -bound, bound)
    with np.errstate(over="ignore"):
        return np.asarray((u + np.float32(1)) * (g / (np.float32(1) + np.exp(-SWIGLU_SLOPE * g))), np.float32)


def expert_ffn(expert: Expert, x: Floats, tokens: Int32s, ranks: Int32s, out: Floats) -> None:
    """Compute one expert: out[tokens[i], ranks[i]] = down(activation(gate x[tokens[i]]) * (up x[tokens[i]])).

    x: [T, D].
    tokens, ranks: int32[n], no pair twice.
    out: [T, K, D], written at these places only.
    Raises ValueError.
    """
    check_array(x, "x", np.float32, 2)
    check_array(tokens, "tokens", np.int32, 1)
    check_array(ranks, "ranks", np.int32, 1)
    check_array(out, "out", np.float32, 3)
    check_shape(x, "x", (x.shape[0], expert.up.columns))
    check_shape(ranks, "ranks", tokens.shape)
    check_shape(out, "out", (x.shape[0], out.shape[1], expert.down.rows))
    check_indices(tokens, "tokens", x.shape[0])
    check_indices(ranks, "ranks", out.shape[1])
    first = [(_weights(m), _inputs(m, x[tokens])) for m in (expert.gate or expert.up, expert.up)]
    down = _weights(expert.down)
    for at, (token, rank) in enumerate(zip(tokens, ranks, strict=True)):
        products = [weights @ inputs[at] for weights, inputs in first]
        if expert.biases:
            products = [product + bias for product, bias in zip(products, expert.biases, strict=False)]
        hidden = gated(products[0], products[1], expert.activation, expert.limit)
        out[token, rank] = down @ _inputs(expert.down, hidden)
        if expert.biases:
            out[token, rank] += expert.biases[2]


def experts_of_token(experts: Sequence[Expert], x: Floats, ranks: Int32s, out: Floats) -> None:
    """Compute several experts for one token: out[0, ranks[i]] = experts[i](x[0]), as `expert_ffn` one by one.

    x: [1, D].
    ranks: int32[n], none twice.
    out: [1, K, D], written at these ranks only.
    Raises ValueError, also for experts of different sizes.
    """
    check_array(ranks, "ranks", np.int32, 1)
    check_shape(ranks, "ranks", (len(experts),))
    sizes = {(expert.up.rows, expert.up.columns) for expert in experts}
    require(len(sizes) <= 1, "experts: expected one size for all")
    if experts:
        check_array(x, "x", np.float32, 2)
        check_shape(x, "x", (1, experts[0].up.columns))
    for expert, rank in zip(experts, ranks, strict=True):
        expert_ffn(expert, x, np.zeros(1, np.int32), np.array([rank], np.int32), out)


def combine(parts: Floats, weights: Floats, out: Floats) -> None:
    """Add the parts of each token: out[t] = sum over ranks, in order, of weights[t, k] * parts[t, k].

    parts: [T, K, D].
    weights: [T, K].
    out: [T, D], written.
    Raises ValueError.
    """
    check_array(parts, "parts", np.float32, 3)
    check_array(weights, "weights", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    check_shape(weights, "weights", parts.shape[:2])
    check_shape(out, "out", (parts.shape[0], parts.shape[2]))
    total = np.zeros_like(out)
    for rank in range(parts.shape[1]):
        total += weights[:, rank, None] * parts[:, rank]
    out[:] = total


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Apply an RMS norm: out = weight * (x / sqrt(mean(x^2) + eps)).

    x, out: [T, D]; out may be x.
    weight: [D].
    Raises ValueError.
    """
    check_array(x, "x", np.float32, 2)
    check_array(weight, "weight", np.float32, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(weight, "weight", x.shape[1:])
    check_shape(out, "out", x.shape)
    inverse = np.float32(1) / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps))
    out[:] = weight * (x * inverse)


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None:
    """Apply a layer norm: out = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, with the variance over all D.

    x, out: [T, D]; out may be x.
    weight, bias: [D].
    Raises ValueError.
    Source: Layer Normalization, section 3.
    """
    check_array(x, "x", np.float32, 2)
    check_array(weight, "weight", np.float32, 1)
    check_array(bias, "bias", np.float32, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(weight, "weight", x.shape[1:])
    check_shape(bias, "bias", x.shape[1:])
    check_shape(out, "out", x.shape)
    centred = x - np.mean(x, axis=1, keepdims=True)
    inverse = np.float32(1) / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + np.float32(eps))
    out[:] = weight * (centred * inverse) + bias


def rope(x: Floats, cos: Floats, sin: Floats, positions: Int32s, interleaved: bool = False) -> None:
    """Rotate the first R features of each head in place: pairs of features from the two halves, or adjacent pairs.

    x: [T, H, Dh].
    cos, sin: [C, R / 2].
    positions: int32[T].
    interleaved: the pairs are adjacent features. They are moved into halves and stay there. Queries and keys both do
    that, so their products stay the same.
    Raises ValueError.
    """
    check_array(x, "x", np.float32, 3)
    check_array(cos, "cos", np.float32, 2)
    check_array(sin, "sin", np.float32, 2)
    check_array(positions, "positions", np.int32, 1)
    check_shape(sin, "sin", cos.shape)
    check_shape(positions, "positions", x.shape[:1])
    check_indices(positions, "positions", cos.shape[0])
    half = cos.shape[1]
    require(2 * half <= x.shape[2], f"cos: expected at most {x.shape[2] // 2} columns, found {half}")
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    parts = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    first, second = (x[:, :, part].copy() for part in parts)
    x[:, :, : 2 * half] = np.concatenate([first * c - second * s, second * c + first * s], axis=2)


def as_cached(rows: Floats, cache: NDArray[Any]) -> NDArray[Any]:
    """Convert keys or values to the cache's dtype: float16 gets the nearest value, at most the largest half float."""
    if cache.dtype != np.float16:
        return rows
    largest = np.float32(np.finfo(np.float16).max)
    return np.clip(rows, -largest, largest).astype(np.float16)


def _cache_kind(k_cache: Floats) -> type[np.float16] | type[np.float32]:
    return np.float16 if k_cache.dtype == np.float16 else np.float32


def _check_cache(k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s, tokens: int) -> None:
    kind = _cache_kind(k_cache)
    check_array(k_cache, "k_cache", kind, 4)
    check_array(v_cache, "v_cache", kind, 4)
    check_array(slots, "slots", np.int32, 1)
    check_array(positions, "positions", np.int32, 1)
    check_shape(v_cache, "v_cache", k_cache.shape)
    check_shape(slots, "slots", (tokens,))
    check_shape(positions, "positions", (tokens,))
    check_indices(slots, "slots", k_cache.shape[0])
    check_indices(positions, "positions", k_cache.shape[2])


def store_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s) -> None:
    """Write the keys and values of each token to its slot and position.

    k, v: [T, Hkv, Dh].
    k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16. float16 gets the nearest value, at most the largest one.
    slots, positions: int32[T].
    Raises ValueError.
    """
    check_array(k, "k", np.float32, 3)
    check_array(v, "v", np.float32, 3)
    _check_cache(k_cache, v_cache, slots, positions, k.shape[0])
    check_shape(k, "k", (k.shape[0], k_cache.shape[1], k_cache.shape[3]))
    check_shape(v, "v", k.shape)
    k_cache[slots, :, positions] = as_cached(k, k_cache)
    v_cache[slots, :, positions] = as_cached(v, v_cache)


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
    """Compute attention of each token over the cache of its slot, with grouped heads. Causal unless `ends` is given.

    q, out: [T, H, Dh], H a multiple of Hkv.
    k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16.
    slots, positions: int32[T].

    scale: factor of every score.
    window: 0 for none, else its size. A token at position p sees positions max(0, p - window + 1) to p.
    sinks: [H], an additional score of each head. It takes a share of the softmax and adds no value.
    ends: int32[T], 1 to C. A token then sees positions 0 to end - 1. `window` must be 0.
    bias: [H, 2 C - 1]. The entry C - 1 + j - p is added to the scaled score of position j for a token at position p.
    Raises ValueError.
    """
    check_array(q, "q", np.float32, 3)
    check_array(out, "out", np.float32, 3)
    _check_cache(k_cache, v_cache, slots, positions, q.shape[0])
    check_shape(out, "out", q.shape)
    kv_heads, head_size = k_cache.shape[1], k_cache.shape[3]
    fits = q.shape[2] == head_size and kv_heads > 0 and q.shape[1] % kv_heads == 0
    require(fits, f"q: expected heads a multiple of {kv_heads} and size {head_size}, found {q.shape[1:]}")
    require(window >= 0, f"window: expected 0 or more, found {window}")
    if sinks is not None:
        check_array(sinks, "sinks", np.float32, 1)
        check_shape(sinks, "sinks", (q.shape[1],))
    context = k_cache.shape[2]
    if ends is not None:
        check_array(ends, "ends", np.int32, 1)
        check_shape(ends, "ends", positions.shape)
        check_indices(ends, "ends", context + 1)
        require(window == 0 and bool(np.all(ends > 0)), "ends: expected at least 1, and no window")
    if bias is not None:
        check_array(bias, "bias", np.float32, 2)
        check_shape(bias, "bias", (q.shape[1], 2 * context - 1))
    for token, (slot, position) in enumerate(zip(slots, positions.tolist(), strict=True)):
        first = max(0, position - window + 1) if window else 0
        end = position + 1 if ends is None else int(ends[token])
        keys = k_cache[slot, :, first:end].astype(np.float32).transpose(0, 2, 1)  # [Hkv, Dh, positions]
        values = v_cache[slot, :, first:end].astype(np.float32)  # [Hkv, positions, Dh]
        scores = q[token].reshape(kv_heads, -1, head_size) @ keys * np.float32(scale)
        if bias is not None:
            offset = context - 1 - position
            scores = scores + bias[:, offset + first : offset + end].reshape(kv_heads, -1, end - first)
        peak = scores.max(axis=-1, keepdims=True)
        own = None if sinks is None else sinks.reshape(kv_heads, -1, 1)
        peak = peak if own is None else np.maximum(peak, own)
        shares = np.exp(scores - peak)
        total = shares.sum(axis=-1, keepdims=True) + (0 if own is None else np.exp(own - peak))
        out[token] = ((shares @ values) / total).reshape(out.shape[1:])


def route(logits: Floats, top_k: int, renormalize: bool) -> tuple[Int32s, Floats]:
    """Choose experts: softmax over all experts, then the top_k of each token, best first.

    Of equal logits the lowest expert wins, in every kernel.
    logits: [T, E].
    renormalize: make the weights of each token sum to 1.
    Returns experts int32[T, K] and weights float32[T, K].
    Raises ValueError.
    """
    check_array(logits, "logits", np.float32, 2)
    require(0 < top_k <= logits.shape[1], f"top_k: expected 1 to {logits.shape[1]}, found {top_k}")
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(shares, experts, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    return experts.astype(np.int32), weights
