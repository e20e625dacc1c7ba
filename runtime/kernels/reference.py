"""The numpy kernels: the oracle of every native one, and what runs where the extension is not built.

Owns the meaning of each operation and nothing else: no threads, no instruction sets, no caching. A packed matrix is
unpacked on each call. Results do not depend on how many tokens are computed together. The bytes are those of
docs/format.md, Packing. Shape letters: T tokens, N rows, K columns or ranks, D hidden, E experts, H heads, Hkv key and
value heads, Dh head size, S slots, C cache positions, R rotated features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moec.manifests.quant import COLUMNS_PER_TILE, ROWS_PER_BLOCK, QuantSpec, round_up

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ACTIVATIONS = ("silu",)
_PLANE_BYTES = 4 * ROWS_PER_BLOCK
_COLUMNS_PER_LANE = 4
_SMALLEST_ROUNDED = np.float32(2.0**-110)  # of a tile; 127 divided by less could overflow


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def check_array(array: np.ndarray, name: str, dtype: type, dimensions: int) -> None:
    """Refuse an array of another dtype, rank or memory order. Raises ValueError."""
    # Messages are made when they are needed: this runs at every layer of every token.
    if array.dtype != dtype:
        raise ValueError(f"{name}: expected {np.dtype(dtype).name}, found {array.dtype}")
    if array.ndim != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimensions, found {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected C-contiguous memory")


def check_shape(array: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
    """Refuse an array of another shape. Raises ValueError."""
    _require(array.shape == shape, f"{name}: expected shape {shape}, found {array.shape}")


def check_indices(indices: NDArray[np.signedinteger], name: str, count: int) -> None:
    """Refuse indices outside 0 .. count - 1. Raises ValueError."""
    outside = indices.size > 0 and bool((indices < 0).any() or (indices >= count).any())
    _require(
        not outside,
        f"{name}: expected indices below {count}, found {indices.min(initial=0)} to {indices.max(initial=0)}",
    )


class PackedMatrix:
    """A weight matrix in layout `rows16`, over memory that somebody else owns.

    data: uint8[packed_bytes], kept by reference and never written. rows, columns: the matrix without row padding.
    Raises ValueError if the buffer does not have exactly the bytes of the format.
    Source: docs/format.md, Packing.
    """

    __slots__ = ("columns", "data", "rows", "spec")

    def __init__(self, data: Bytes, rows: int, columns: int, spec: QuantSpec) -> None:
        check_array(data, "data", np.uint8, 1)
        expected = spec.packed_bytes(rows, columns)
        _require(data.size == expected, f"data: {rows} x {columns} in {spec} takes {expected} bytes, found {data.size}")
        self.data = data
        self.rows = rows
        self.columns = columns
        self.spec = spec


class Expert:
    """The three projections of one expert: down(activation(gate x) * (up x)).

    gate, up: F x D. down: D x F. Raises ValueError if the shapes do not fit or the activation is unknown.
    """

    __slots__ = ("activation", "down", "gate", "up")

    def __init__(self, gate: PackedMatrix, up: PackedMatrix, down: PackedMatrix, activation: str = "silu") -> None:
        fits = (gate.rows, gate.columns) == (up.rows, up.columns) == (down.columns, down.rows)
        shapes = ", ".join(f"{matrix.rows} x {matrix.columns}" for matrix in (gate, up, down))
        _require(fits, f"gate, up and down: expected F x D, F x D and D x F, found {shapes}")
        _require(activation in ACTIVATIONS, f"activation: expected one of {ACTIVATIONS}, found `{activation}`")
        self.gate = gate
        self.up = up
        self.down = down
        self.activation = activation


def _crumbs(planes: Bytes, bits: int) -> Bytes:
    """Split bytes into fields of `bits` bits, lowest first, along a new third axis.

    planes: uint8[tiles, planes, 64] -> uint8[tiles, planes, 8 / bits, 64].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray((planes[:, :, None, :] >> shifts) & np.uint8(2**bits - 1))


def _tile_codes(tiles: Bytes, bitwidth: int) -> Bytes:
    """Codes of tiles. tiles: uint8[n, 64 * bitwidth] -> uint8[n, 16, 32]. Source: docs/format.md, Packing, table."""
    planes = tiles.reshape(len(tiles), bitwidth, _PLANE_BYTES)
    if bitwidth == 3:
        lanes = _crumbs(planes[:, :2], 2).reshape(len(tiles), -1, _PLANE_BYTES)
        lanes = lanes | _crumbs(planes[:, 2:], 1).reshape(lanes.shape) << np.uint8(2)
    else:
        lanes = _crumbs(planes, bitwidth)
    # lanes: q, then byte 4 r + c; column k = 4 q + c
    by_lane = lanes.reshape(len(tiles), -1, ROWS_PER_BLOCK, _COLUMNS_PER_LANE)
    return np.asarray(by_lane.transpose(0, 2, 1, 3).reshape(len(tiles), ROWS_PER_BLOCK, COLUMNS_PER_TILE))


def _groups(data: Bytes, rows: int, columns: int, spec: QuantSpec) -> tuple[Bytes, Floats, Floats]:
    """Tiles, scales and minima: uint8[blocks, G, tiles, bytes], float32[blocks, G, 16] twice."""
    blocks, groups = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK, spec.groups(columns)
    scale_bytes = 2 * ROWS_PER_BLOCK
    records = data.reshape(blocks, groups, -1)
    scales = records[:, :, :scale_bytes].copy().view("<f2").astype(np.float32)
    if spec.symmetric:
        minima, start = scales * np.float32(-(2 ** (spec.bitwidth - 1))), scale_bytes
    else:
        minima, start = (
            records[:, :, scale_bytes : 2 * scale_bytes].copy().view("<f2").astype(np.float32),
            2 * scale_bytes,
        )
    return records[:, :, start:].reshape(blocks, groups, -1, _PLANE_BYTES * spec.bitwidth), scales, minima


def unpack_codes(data: Bytes, rows: int, columns: int, spec: QuantSpec) -> Bytes:
    """The codes of a quantized matrix.

    data: uint8[packed_bytes]. Returns uint8[rows, columns]. Raises ValueError for 16-bit formats and wrong sizes.
    Source: docs/format.md, Packing.
    """
    _require(spec.bitwidth != 16, "a 16-bit matrix has no codes")
    PackedMatrix(data, rows, columns, spec)
    tiles, _, _ = _groups(data, rows, columns, spec)
    blocks = tiles.shape[0]
    codes = _tile_codes(tiles.reshape(-1, tiles.shape[-1]), spec.bitwidth)
    by_block = codes.reshape(blocks, columns // COLUMNS_PER_TILE, ROWS_PER_BLOCK, COLUMNS_PER_TILE)
    return np.asarray(by_block.transpose(0, 2, 1, 3).reshape(-1, columns)[:rows])


def _unpack_16_bit(data: Bytes, columns: int, spec: QuantSpec) -> Floats:
    if spec.float_type == "bfloat16":
        values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = data.view("<f2").astype(np.float32)
    return np.asarray(values.reshape(-1, columns, ROWS_PER_BLOCK).transpose(0, 2, 1).reshape(-1, columns))


def unpack(data: Bytes, rows: int, columns: int, spec: QuantSpec) -> Floats:
    """The weights of a packed matrix, each rounded once.

    data: uint8[packed_bytes]. Returns float32[rows, columns]. Raises ValueError for wrong sizes.
    scale * code + minimum is exact in float64 (at most 49 bits), so the one rounding is that of fmaf.
    Source: docs/format.md, Packing.
    """
    PackedMatrix(data, rows, columns, spec)
    if spec.bitwidth == 16:
        return _unpack_16_bit(data, columns, spec)[:rows]
    codes = unpack_codes(data, rows, columns, spec)
    _, scales, minima = _groups(data, rows, columns, spec)
    groups = scales.shape[1]
    row_scales = scales.transpose(0, 2, 1).reshape(-1, groups, 1)[:rows].astype(np.float64)
    row_minima = minima.transpose(0, 2, 1).reshape(-1, groups, 1)[:rows].astype(np.float64)
    weights = row_scales * codes.reshape(rows, groups, -1) + row_minima
    return np.asarray(weights.astype(np.float32).reshape(rows, columns))


def _weights(matrix: PackedMatrix) -> Floats:
    return unpack(matrix.data, matrix.rows, matrix.columns, matrix.spec)


def round_activations(x: Floats) -> Floats:
    """Each row rounded to 8 bits per tile of 32 columns, as every quantized matrix reads it: codes times steps.

    x: [T, K], K a multiple of 32. step = max |x| / 127 of the tile, codes x * (127 / max |x|) to nearest even. A tile
    whose values are all below 2^-110 becomes zero, one with a value that is not finite becomes NaN.
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
        target[:] = weights @ row  # token by token: the same sums whatever the batch


def linear(matrix: PackedMatrix, x: Floats, out: Floats) -> None:
    """out = x W^T. x: [T, K]; out: [T, N], written. Raises ValueError for wrong shapes.

    A quantized matrix reads x rounded to 8 bits (`round_activations`), one of 16 bits as it is.
    """
    check_array(x, "x", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    check_shape(x, "x", (x.shape[0], matrix.columns))
    check_shape(out, "out", (x.shape[0], matrix.rows))
    _product(_weights(matrix), _inputs(matrix, x), out)


def linears(matrices: Sequence[PackedMatrix], x: Floats, outs: Sequence[Floats]) -> None:
    """outs[i] = x W_i^T. matrices: 1 to 8 of K columns; x: [T, K]; outs[i]: [T, N_i], written. Raises ValueError."""
    _require(0 < len(matrices) <= 8 and len(outs) == len(matrices), "matrices: expected 1 to 8 and as many outputs")
    for matrix, out in zip(matrices, outs, strict=True):
        linear(matrix, x, out)


def dequantize_rows(matrix: PackedMatrix, rows: Int64s, out: Floats) -> None:
    """out[i] = row rows[i] of the matrix. rows: int64[n]; out: [n, K], written. Raises ValueError."""
    check_array(rows, "rows", np.int64, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(out, "out", (rows.size, matrix.columns))
    check_indices(rows, "rows", matrix.rows)
    out[:] = _weights(matrix)[rows]


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x)), float32; never NaN for finite x."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.divide(x, np.float32(1) + np.exp(-x), dtype=np.float32))


def expert_ffn(expert: Expert, x: Floats, tokens: Int32s, ranks: Int32s, out: Floats) -> None:
    """out[tokens[i], ranks[i]] = down(silu(gate x[tokens[i]]) * (up x[tokens[i]])) for each i.

    x: [T, D]; tokens, ranks: int32[n], no pair twice; out: [T, K, D], written at those places only. Raises ValueError.
    """
    check_array(x, "x", np.float32, 2)
    check_array(tokens, "tokens", np.int32, 1)
    check_array(ranks, "ranks", np.int32, 1)
    check_array(out, "out", np.float32, 3)
    check_shape(x, "x", (x.shape[0], expert.gate.columns))
    check_shape(ranks, "ranks", tokens.shape)
    check_shape(out, "out", (x.shape[0], out.shape[1], expert.down.rows))
    check_indices(tokens, "tokens", x.shape[0])
    check_indices(ranks, "ranks", out.shape[1])
    gate, up, down = _weights(expert.gate), _weights(expert.up), _weights(expert.down)
    gate_inputs, up_inputs = _inputs(expert.gate, x[tokens]), _inputs(expert.up, x[tokens])
    for at, (token, rank) in enumerate(zip(tokens, ranks, strict=True)):
        hidden = silu(gate @ gate_inputs[at]) * (up @ up_inputs[at])
        out[token, rank] = down @ _inputs(expert.down, hidden)


def experts_of_token(experts: Sequence[Expert], x: Floats, ranks: Int32s, out: Floats) -> None:
    """out[0, ranks[i]] = what experts[i] makes of the only token, as `expert_ffn` one by one.

    x: [1, D]; ranks: int32[n], none twice; out: [1, K, D], written at those places only. Raises ValueError, also for
    experts of different sizes.
    """
    check_array(ranks, "ranks", np.int32, 1)
    check_shape(ranks, "ranks", (len(experts),))
    sizes = {(expert.gate.rows, expert.gate.columns) for expert in experts}
    _require(len(sizes) <= 1, "experts: expected one size for all")
    if experts:
        check_array(x, "x", np.float32, 2)
        check_shape(x, "x", (1, experts[0].gate.columns))
    for expert, rank in zip(experts, ranks, strict=True):
        expert_ffn(expert, x, np.zeros(1, np.int32), np.array([rank], np.int32), out)


def combine(parts: Floats, weights: Floats, out: Floats) -> None:
    """out[t] = sum over ranks, in order, of weights[t, k] * parts[t, k].

    parts: [T, K, D]; weights: [T, K]; out: [T, D], written. Raises ValueError.
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
    """out = weight * (x / sqrt(mean(x^2) + eps)). x, out: [T, D]; weight: [D]. out may be x. Raises ValueError."""
    check_array(x, "x", np.float32, 2)
    check_array(weight, "weight", np.float32, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(weight, "weight", x.shape[1:])
    check_shape(out, "out", x.shape)
    inverse = np.float32(1) / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps))
    out[:] = weight * (x * inverse)


def rope(x: Floats, cos: Floats, sin: Floats, positions: Int32s) -> None:
    """Rotate the first R features of each head in place, halves against each other.

    x: [T, H, Dh]; cos, sin: [C, R / 2]; positions: int32[T]. Raises ValueError.
    """
    check_array(x, "x", np.float32, 3)
    check_array(cos, "cos", np.float32, 2)
    check_array(sin, "sin", np.float32, 2)
    check_array(positions, "positions", np.int32, 1)
    check_shape(sin, "sin", cos.shape)
    check_shape(positions, "positions", x.shape[:1])
    check_indices(positions, "positions", cos.shape[0])
    half = cos.shape[1]
    _require(2 * half <= x.shape[2], f"cos: expected at most {x.shape[2] // 2} columns, found {half}")
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    first, second = x[:, :, :half].copy(), x[:, :, half : 2 * half].copy()
    x[:, :, :half] = first * c - second * s
    x[:, :, half : 2 * half] = second * c + first * s


def _check_cache(k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s, tokens: int) -> None:
    check_array(k_cache, "k_cache", np.float32, 4)
    check_array(v_cache, "v_cache", np.float32, 4)
    check_array(slots, "slots", np.int32, 1)
    check_array(positions, "positions", np.int32, 1)
    check_shape(v_cache, "v_cache", k_cache.shape)
    check_shape(slots, "slots", (tokens,))
    check_shape(positions, "positions", (tokens,))
    check_indices(slots, "slots", k_cache.shape[0])
    check_indices(positions, "positions", k_cache.shape[2])


def store_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s) -> None:
    """Write keys and values of each token to its slot and position.

    k, v: [T, Hkv, Dh]; k_cache, v_cache: [S, Hkv, C, Dh]; slots, positions: int32[T]. Raises ValueError.
    """
    check_array(k, "k", np.float32, 3)
    check_array(v, "v", np.float32, 3)
    _check_cache(k_cache, v_cache, slots, positions, k.shape[0])
    check_shape(k, "k", (k.shape[0], k_cache.shape[1], k_cache.shape[3]))
    check_shape(v, "v", k.shape)
    k_cache[slots, :, positions] = k
    v_cache[slots, :, positions] = v


def attention(
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    slots: Int32s,
    positions: Int32s,
    scale: float,
    window: int,
    out: Floats,
) -> None:
    """Causal attention of each token over the cache of its slot, with grouped heads.

    q, out: [T, H, Dh]; k_cache, v_cache: [S, Hkv, C, Dh], H a multiple of Hkv; slots, positions: int32[T].
    A token at position p sees positions max(0, p - window + 1) to p, from 0 if window is 0. Raises ValueError.
    """
    check_array(q, "q", np.float32, 3)
    check_array(out, "out", np.float32, 3)
    _check_cache(k_cache, v_cache, slots, positions, q.shape[0])
    check_shape(out, "out", q.shape)
    kv_heads, head_size = k_cache.shape[1], k_cache.shape[3]
    fits = q.shape[2] == head_size and kv_heads > 0 and q.shape[1] % kv_heads == 0
    _require(fits, f"q: expected heads a multiple of {kv_heads} and size {head_size}, found {q.shape[1:]}")
    _require(window >= 0, f"window: expected 0 or more, found {window}")
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        first = max(0, int(position) - window + 1) if window else 0
        keys = k_cache[slot, :, first : position + 1].transpose(0, 2, 1)  # [Hkv, Dh, positions]
        values = v_cache[slot, :, first : position + 1]  # [Hkv, positions, Dh]
        scores = q[token].reshape(kv_heads, -1, head_size) @ keys * np.float32(scale)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[token] = ((shares @ values) / shares.sum(axis=-1, keepdims=True)).reshape(out.shape[1:])


def route(logits: Floats, top_k: int, renormalize: bool) -> tuple[Int32s, Floats]:
    """Softmax over all experts, then the top_k of each token, best first.

    logits: [T, E]. Returns experts int32[T, K] and weights float32[T, K]; rows sum to 1 if `renormalize`.
    Equal logits: the lowest expert wins, on every kernel. Raises ValueError.
    """
    check_array(logits, "logits", np.float32, 2)
    _require(0 < top_k <= logits.shape[1], f"top_k: expected 1 to {logits.shape[1]}, found {top_k}")
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(shares, experts, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    return experts.astype(np.int32), weights
