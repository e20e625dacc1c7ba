"""Attention over the cache of keys and values in numpy, and its preparation: rotation and storage.

Shape letters:
T tokens, H heads, Hkv heads of keys and values, Dh head size, R rotated features of a head.
S slots, C cache positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..packed_matrix import Floats, Int32s, check_array, check_indices, check_shape, require
from ..stream_layer import AttentionRule, TokenPlaces
from .matmul import matmul


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


def _check_cache(k_cache: Floats, v_cache: Floats, places: TokenPlaces, tokens: int) -> None:
    kind = _cache_kind(k_cache)
    check_array(k_cache, "k_cache", kind, 4)
    check_array(v_cache, "v_cache", kind, 4)
    check_shape(v_cache, "v_cache", k_cache.shape)
    for indices, name, count in (
        (places.slots, "slots", k_cache.shape[0]),
        (places.positions, "positions", k_cache.shape[2]),
    ):
        check_array(indices, name, np.int32, 1)
        check_shape(indices, name, (tokens,))
        check_indices(indices, name, count)


def store_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int32s, positions: Int32s) -> None:
    """Write the keys and values of each token to its slot and position.

    k, v: [T, Hkv, Dh].
    k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16. float16 gets the nearest value, at most the largest one.
    slots, positions: int32[T].
    Raises ValueError.
    """
    check_array(k, "k", np.float32, 3)
    check_array(v, "v", np.float32, 3)
    _check_cache(k_cache, v_cache, TokenPlaces(slots, positions), k.shape[0])
    check_shape(k, "k", (k.shape[0], k_cache.shape[1], k_cache.shape[3]))
    check_shape(v, "v", k.shape)
    k_cache[slots, :, positions] = as_cached(k, k_cache)
    v_cache[slots, :, positions] = as_cached(v, v_cache)


def attention(
    q: Floats, k_cache: Floats, v_cache: Floats, places: TokenPlaces, rule: AttentionRule, out: Floats
) -> None:
    """Compute attention of each token over the cache of its slot, with grouped heads.

    q: [T, H, Dh], H a multiple of Hkv.
    k_cache, v_cache: [S, Hkv, C, Dh], float32 or float16.
    out: [T, H, Dh], written.
    Raises ValueError.
    """
    check_array(q, "q", np.float32, 3)
    check_array(out, "out", np.float32, 3)
    _check_cache(k_cache, v_cache, places, q.shape[0])
    check_shape(out, "out", q.shape)
    kv_heads, head_size = k_cache.shape[1], k_cache.shape[3]
    fits = q.shape[2] == head_size and kv_heads > 0 and q.shape[1] % kv_heads == 0
    require(fits, f"q: expected heads a multiple of {kv_heads} and size {head_size}, found {q.shape[1:]}")
    _check_rule(places, rule, q.shape[1], k_cache.shape[2])
    for token, (slot, position) in enumerate(zip(places.slots, places.positions.tolist(), strict=True)):
        first = max(0, position - rule.window + 1) if rule.window else 0
        end = position + 1 if places.ends is None else int(places.ends[token])
        keys = k_cache[slot, :, first:end].astype(np.float32).transpose(0, 2, 1)  # [Hkv, Dh, positions]
        values = v_cache[slot, :, first:end].astype(np.float32)  # [Hkv, positions, Dh]
        scores = matmul(q[token].reshape(kv_heads, -1, head_size), keys) * np.float32(rule.scale)
        if rule.bias is not None:
            offset = k_cache.shape[2] - 1 - position
            scores = scores + rule.bias[:, offset + first : offset + end].reshape(kv_heads, -1, end - first)
        out[token] = _weighted_mean(scores, values, rule.sinks).reshape(out.shape[1:])


def _check_rule(places: TokenPlaces, rule: AttentionRule, heads: int, context: int) -> None:
    """Check the rule and the ends of tokens, for a cache of `context` positions. Raises ValueError."""
    require(rule.window >= 0, f"window: expected 0 or more, found {rule.window}")
    if rule.sinks is not None:
        check_array(rule.sinks, "sinks", np.float32, 1)
        check_shape(rule.sinks, "sinks", (heads,))
    if places.ends is not None:
        check_array(places.ends, "ends", np.int32, 1)
        check_shape(places.ends, "ends", places.positions.shape)
        check_indices(places.ends, "ends", context + 1)
        require(rule.window == 0 and bool(np.all(places.ends > 0)), "ends: expected at least 1, and no window")
    if rule.bias is not None:
        check_array(rule.bias, "bias", np.float32, 2)
        check_shape(rule.bias, "bias", (heads, 2 * context - 1))


def _weighted_mean(scores: Floats, values: Floats, sinks: Floats | None) -> Floats:
    """Return the mean of values, weighted by the softmax of scores: [Hkv, n, positions] -> [Hkv, n, Dh].

    values: [Hkv, positions, Dh].
    sinks: [H], H = Hkv n.
    """
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        shares = np.exp(scores - peak)
        total = shares.sum(axis=-1, keepdims=True)
    else:
        own = sinks.reshape(len(scores), -1, 1)
        peak = np.maximum(peak, own)
        shares = np.exp(scores - peak)
        total = shares.sum(axis=-1, keepdims=True) + np.exp(own - peak)
    return np.asarray(matmul(shares, values) / total)
