"""Norms, rotations, attention, routes, sums: compared with float64, and between instruction sets and threads (G8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.runtime import kernels
from moec.runtime.kernels import reference
from moec.runtime.kernels.reference.matmul import matmul
from tests.kernels.conftest import need
from tests.kernels.packer import LENGTHS, bits
from tests.kernels.products import UNIT, gate

EXP_ERROR = 2e-7


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def agree(pair: tuple[str, str], compute: Callable[[], np.ndarray]) -> None:
    """Check that both instruction sets give the same bits, with 1 and 3 threads."""
    found = []
    for name in pair:
        kernels.select(name)
        for threads in (1, 3):
            kernels.set_threads(threads)
            found.append(compute())
    assert all(np.array_equal(bits(found[0]), bits(other)) for other in found[1:])


def norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    out = np.full_like(x, np.nan)
    kernels.rms_norm(x, weight, eps, out)
    return out


@gate
def test_rms_norm(every: str) -> None:
    for size in LENGTHS:
        x, weight = normal(3, size), normal(size)
        wide = x.astype(np.float64)
        exact = weight * (wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5))
        bound = (size + 8) * UNIT * np.abs(exact)  # roundings of sum, mean, eps, root, inverse and two products
        assert (np.abs(norm(x, weight) - exact) <= bound).all()


@gate
def test_rms_norm_agrees(pair: tuple[str, str]) -> None:
    for size in LENGTHS:
        agree(pair, lambda size=size: norm(normal(5, size), normal(size)))
    agree(pair, lambda: norm(normal(700, 512), normal(512)))


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    out = np.full_like(x, np.nan)
    kernels.layer_norm(x, weight, bias, eps, out)
    return out


@gate
@pytest.mark.parametrize("shift", [0, 40])
def test_layer_norm(every: str, shift: float) -> None:
    """Values may be far from zero, where the mean square minus the squared mean would lose all digits."""
    for size in LENGTHS:
        x, weight, bias = normal(3, size) + np.float32(shift), normal(size), normal(size, seed=1)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(axis=1, keepdims=True)
        inverse = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
        exact = weight * centred * inverse + bias
        # A centred value has the error of the mean, and the root the same error relatively. The rest is as in rms_norm.
        off = (size + 4) * UNIT * np.abs(wide).mean(axis=1, keepdims=True) + UNIT * np.abs(centred)
        relative = off * inverse + (size + 8) * UNIT
        bound = np.abs(weight) * inverse * (off + np.abs(centred) * relative)
        rounded = 3 * UNIT * (np.abs(exact) + np.abs(bias))  # the last product and sum
        assert (np.abs(layer_norm(x, weight, bias) - exact) <= bound + rounded).all()


@gate
def test_layer_norm_agrees(pair: tuple[str, str]) -> None:
    for size in LENGTHS:
        agree(pair, lambda size=size: layer_norm(normal(5, size), normal(size), normal(size, seed=1)))
    agree(pair, lambda: layer_norm(normal(700, 512), normal(512), normal(512, seed=1)))


@gate
def test_layer_norm_in_place_and_row_by_row(every: str) -> None:
    """Results depend neither on the batch nor on the place of the output."""
    x, weight, bias = normal(9, 77), normal(77), normal(77, seed=1)
    expected = layer_norm(x, weight, bias)
    rows = [layer_norm(x[at : at + 1], weight, bias)[0] for at in range(len(x))]
    assert np.array_equal(bits(np.stack(rows)), bits(expected))
    kernels.layer_norm(x, weight, bias, 1e-5, x)
    assert np.array_equal(bits(x), bits(expected))


@gate
@pytest.mark.parametrize("half", [1, 3, 4, 8, 17, 32])
def test_rope(every: str, half: int) -> None:
    size = 2 * half + 3
    x, positions = normal(4, 2, size), np.array([0, 9, 4, 4], np.int32)
    angles = np.outer(np.arange(10), 1 / 10 ** (np.arange(half) / half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[:, :, :half].astype(np.float64), x[:, :, half : 2 * half].astype(np.float64)
    c, s = cos[positions][:, None], sin[positions][:, None]
    exact = np.concatenate([first * c - second * s, second * c + first * s, x[:, :, 2 * half :]], axis=2)
    bound = 2 * UNIT * (np.abs(first) + np.abs(second))
    out = x.copy()
    kernels.rope(out, cos, sin, positions)
    error = np.abs(out - exact)
    assert (error[:, :, :half] <= bound).all() and (error[:, :, half : 2 * half] <= bound).all()
    assert np.array_equal(out[:, :, 2 * half :], x[:, :, 2 * half :])


@gate
@pytest.mark.parametrize("half", [1, 3, 8, 17])
def test_rope_of_neighbours_is_that_of_halves_behind_them(every: str, half: int) -> None:
    x, positions = normal(40, 2, 2 * half + 3), np.arange(40, dtype=np.int32) % 10
    cos, sin = normal(10, half), normal(10, half, seed=1)
    halves = np.concatenate([x[:, :, : 2 * half : 2], x[:, :, 1 : 2 * half : 2], x[:, :, 2 * half :]], axis=2)
    kernels.rope(x, cos, sin, positions, interleaved=True)
    kernels.rope(halves, cos, sin, positions)
    assert np.array_equal(bits(x), bits(halves))


@gate
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_agrees(pair: tuple[str, str], interleaved: bool) -> None:
    cos, sin = normal(10, 33), normal(10, 33, seed=1)

    def compute() -> np.ndarray:
        x = normal(600, 16, 70)  # enough work for several threads
        kernels.rope(x, cos, sin, np.arange(600, dtype=np.int32) % 10, interleaved)
        return x

    agree(pair, compute)


class Cache:
    """Three slots of 40 positions, filled by store_kv with random keys and values."""

    def __init__(self, kv_heads: int, head_size: int, kind: type[np.floating[Any]] = np.float32) -> None:
        shape = (3, kv_heads, 40, head_size)
        self.keys, self.values = np.zeros(shape, kind), np.zeros(shape, kind)
        k, v = normal(120, kv_heads, head_size), normal(120, kv_heads, head_size, seed=1)
        slots, positions = np.divmod(np.random.default_rng(0).permutation(120).astype(np.int32), np.int32(40))
        kernels.store_kv(k, v, self.keys, self.values, slots, positions)
        for t, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            assert np.array_equal(self.keys[slot, :, position], k[t].astype(kind))
            assert np.array_equal(self.values[slot, :, position], v[t].astype(kind))
        self.slots = np.array([0, 2, 1, 1, 0], np.int32)
        self.positions = np.array([0, 39, 6, 7, 21], np.int32)
        self.ends: np.ndarray | None = None

    def attend(
        self, q: np.ndarray, window: int = 0, sinks: np.ndarray | None = None, bias: np.ndarray | None = None
    ) -> np.ndarray:
        out = np.full_like(q, np.nan)
        places = kernels.TokenPlaces(self.slots, self.positions, self.ends)
        rule = kernels.AttentionRule(0.3, window, sinks, bias)
        kernels.attention(q, self.keys, self.values, places, rule, out)
        return out


def check_attention(
    cache: Cache, q: np.ndarray, window: int = 0, sinks: np.ndarray | None = None, bias: np.ndarray | None = None
) -> None:
    """Compare with the definition in float64. A token sees all before its end, or the last ones in a window."""
    out, (_, heads, size) = cache.attend(q, window, sinks, bias), q.shape
    ends = cache.positions + 1 if cache.ends is None else cache.ends
    for t, (slot, position, end) in enumerate(zip(cache.slots, cache.positions.tolist(), ends, strict=True)):
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            of_head = (slot, head * cache.keys.shape[1] // heads, slice(first, end))
            keys, values = cache.keys[of_head].astype(np.float64), cache.values[of_head].astype(np.float64)
            scores, added = keys @ q[t, head] * 0.3, np.zeros(1)
            if bias is not None:
                added = np.array([bias[head, 39 + at - position] for at in range(end)], np.float64)
            scores = scores + added
            sink = -np.inf if sinks is None else float(sinks[head])
            peak = max(scores.max(), sink)
            shares = np.exp(scores - peak)
            shares /= shares.sum() + np.exp(sink - peak)
            # A score has an error of `shift`. A share has it in its part and in the sum, plus the error of exp. Sums
            # have a rounding per position.
            terms = size + (3 if bias is None else 5)
            shift = terms * UNIT * ((np.abs(keys) @ np.abs(q[t, head])).max() * 0.3 + np.abs(added).max())
            relative = 4 * shift + 2 * EXP_ERROR + (2 * len(keys) + 4) * UNIT
            assert (np.abs(out[t, head] - shares @ values) <= relative * (shares @ np.abs(values))).all()


@gate
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 72), (2, 1, 5), (8, 2, 128)])
def test_attention(every: str, heads: int, kv_heads: int, size: int, window: int, has_sinks: bool) -> None:
    check_attention(
        Cache(kv_heads, size), normal(5, heads, size), window, 3 * normal(heads, seed=4) if has_sinks else None
    )


@gate
@pytest.mark.parametrize("has_ends", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 72), (2, 1, 5)])
def test_attention_with_a_bias_of_distances(every: str, heads: int, kv_heads: int, size: int, has_ends: bool) -> None:
    """Every pair of positions has its own bias, so that a wrong offset shows. Ends lie before and after the token."""
    cache = Cache(kv_heads, size)
    cache.ends = np.array([3, 40, 7, 1, 40], np.int32) if has_ends else None
    check_attention(cache, normal(5, heads, size), bias=normal(heads, 2 * 40 - 1, seed=9))


@gate
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 72), (2, 1, 5)])
def test_attention_agrees(pair: tuple[str, str], heads: int, kv_heads: int, size: int) -> None:
    cache = Cache(kv_heads, size)
    for window in (0, 3):
        agree(pair, lambda window=window: cache.attend(normal(5, heads, size), window))
    agree(pair, lambda: cache.attend(normal(5, heads, size), 0, normal(heads, seed=4)))
    cache.ends = np.array([1, 13, 40, 8, 7], np.int32)
    agree(pair, lambda: cache.attend(normal(5, heads, size), bias=normal(heads, 79, seed=9)))
    cache.ends = None
    cache.slots, cache.positions = np.arange(100, dtype=np.int32) % 3, np.arange(100, dtype=np.int32) % 40
    agree(pair, lambda: cache.attend(normal(100, heads, size)))


@gate
@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_half_floats_are_the_nearest(values: list[int]) -> None:
    """Any bits of a float: NaN, infinities, ties, subnormal values, values that round up to a power of two."""
    k = np.array(values, np.uint32).view(np.float32).reshape(1, 1, -1)
    slots, positions = np.zeros(1, np.int32), np.zeros(1, np.int32)
    cache = [np.zeros((1, 1, 1, k.shape[2]), np.float16) for _ in range(2)]
    kernels.store_kv(k, k, *cache, slots, positions)
    expected = reference.as_cached(k[0, 0], cache[0])
    assert np.array_equal(cache[0].reshape(-1), expected, equal_nan=True)
    assert np.array_equal(cache[1], cache[0], equal_nan=True)


@gate
def test_every_half_float_and_what_lies_between_two() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1].astype(np.float64) + halves[1:]) / 2
    rows = np.concatenate([halves, between, np.nextafter(between.astype(np.float32), np.float32(0)), -halves]).astype(
        np.float32
    )
    k, places = rows.reshape(1, 1, -1), (np.zeros(1, np.int32), np.zeros(1, np.int32))
    cache = [np.zeros((1, 1, 1, rows.size), np.float16) for _ in range(2)]
    kernels.store_kv(k, k, *cache, *places)
    assert np.array_equal(cache[0].reshape(-1).view(np.uint16), rows.astype(np.float16).view(np.uint16))


@gate
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 72), (2, 1, 5), (8, 2, 128)])
def test_attention_over_half_floats_is_that_over_the_same_floats(
    every: str, heads: int, kv_heads: int, size: int, window: int
) -> None:
    """A cache of half floats gives the bits of a float cache with the same values, subnormal ones included."""
    halves, q = Cache(kv_heads, size, np.float16), normal(5, heads, size)
    halves.keys[1] *= np.float16(2**-16)
    floats = Cache(kv_heads, size)
    floats.keys, floats.values = halves.keys.astype(np.float32), halves.values.astype(np.float32)
    for slots, positions in ((halves.slots, halves.positions), (np.full(5, 1, np.int32), np.arange(5, dtype=np.int32))):
        for cache in (halves, floats):
            cache.slots, cache.positions = slots, positions
        assert np.array_equal(bits(halves.attend(q, window)), bits(floats.attend(q, window)))


@gate
def test_attention_of_a_token_does_not_depend_on_its_batch(every: str) -> None:
    cache, q = Cache(2, 64), normal(5, 4, 64)
    together = cache.attend(q)
    slots, positions = cache.slots, cache.positions
    for t in range(5):
        cache.slots, cache.positions = slots[t : t + 1], positions[t : t + 1]
        assert np.array_equal(bits(cache.attend(q[t : t + 1])), bits(together[t : t + 1]))


@gate
def test_combine(every: str) -> None:
    for size in LENGTHS:
        parts, weights, out = normal(3, 4, size), normal(3, 4), np.full((3, size), np.float32(np.nan))
        kernels.combine(parts, weights, out)
        terms = weights[:, :, None].astype(np.float64) * parts
        assert (np.abs(out - terms.sum(axis=1)) <= 8 * UNIT * np.abs(terms).sum(axis=1)).all()


@gate
def test_combine_agrees(pair: tuple[str, str]) -> None:
    def compute(size: int, tokens: int) -> np.ndarray:
        out = np.full((tokens, size), np.float32(np.nan))
        kernels.combine(normal(tokens, 4, size), normal(tokens, 4), out)
        return out

    for size in LENGTHS:
        agree(pair, lambda size=size: compute(size, 3))
    agree(pair, lambda: compute(512, 700))


def expected_order(logits: np.ndarray, top_k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k] for row in logits.tolist()]


@gate
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(every: str, renormalize: bool) -> None:
    for size in LENGTHS:
        logits, top_k = 5 * normal(3, size), min(size, 8)
        experts, weights = kernels.route(logits, top_k, renormalize)
        assert experts.dtype == np.int32 and weights.dtype == np.float32
        assert experts.tolist() == expected_order(logits, top_k)
        shares = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        exact = np.take_along_axis(shares, experts.astype(np.int64), axis=1)
        exact /= exact.sum(axis=1, keepdims=True) if renormalize else shares.sum(axis=1, keepdims=True)
        relative = 2 * (EXP_ERROR + 40 * UNIT) + (size + top_k + 4) * UNIT  # 40: x - max is at most 40, and rounded
        assert (np.abs(weights - exact) <= relative * exact + 1e-44).all()


@gate
@settings(derandomize=True)
@given(
    st.lists(st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 1.0, 1.0000001, 3e38]), min_size=1, max_size=40),
    st.integers(1, 40),
)
def test_route_breaks_ties_by_index(values: list[float], top_k: int) -> None:
    logits = np.array([[*values, 0.5]], np.float32)
    top_k = min(top_k, len(values) + 1)
    for name in kernels.available():
        kernels.select(name)
        experts, weights = kernels.route(logits, top_k, True)
        assert experts.tolist() == expected_order(logits, top_k)
        assert abs(float(weights.sum()) - 1) <= top_k * 2 * UNIT


@gate
def test_route_with_nan_stays_in_range(native: str) -> None:
    logits = np.array([[np.nan, 1, np.nan, 2], [np.nan] * 4, [-np.inf] * 4], np.float32)
    experts, _ = kernels.route(logits, 4, False)
    assert experts.tolist() == [[3, 1, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@gate
def test_route_agrees(pair: tuple[str, str]) -> None:
    for size in LENGTHS:
        agree(pair, lambda size=size: kernels.route(normal(40, size), min(size, 6), True)[1])


def exp(x: np.ndarray) -> np.ndarray:
    extension = kernels.loaded()
    assert extension is not None
    out = np.empty_like(x)
    extension.exp(x, out)
    return out


@gate
def test_exp(native: str) -> None:
    x = np.linspace(-87.3, 88.7, 1_000_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exp(x) / exact - 1).max() <= EXP_ERROR
    small = np.linspace(-110, -87.3, 2_001).astype(np.float32)
    assert np.abs(exp(small) - np.exp(small.astype(np.float64))).max() <= 2.0**-149
    with np.errstate(over="ignore"):
        edges = np.array([-np.inf, -1e30, -3e38, -105, 0, 89, 1e30, np.inf], np.float32)
    assert exp(edges).tolist() == [0, 0, 0, 0, 1, np.inf, np.inf, np.inf]
    assert np.isnan(exp(np.array([np.nan], np.float32))).all()


@gate
def test_exp_agrees(pair: tuple[str, str]) -> None:
    x = np.random.default_rng(0).uniform(-110, 95, 100_003).astype(np.float32)
    agree(pair, lambda: exp(x))


def test_need_names_what_is_missing() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"not built|no avx512"):
        need("avx512")


def test_a_product_of_numpy_warns_of_nothing_invalid(recwarn: pytest.WarningsRecorder) -> None:
    """A BLAS may report invalid values for finite operands; what is not finite shows in the result."""
    infinite = np.array([[np.inf, -np.inf]], np.float32)
    assert np.isnan(matmul(infinite, np.ones((2, 1), np.float32))).all()
    assert not recwarn.list
