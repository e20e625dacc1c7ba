"""Random calls of the extension, one argument spoiled in four of ten: each computes, or raises ValueError or TypeError.

Every array ends where a forbidden page begins: a read or write past the end is a crash.

As a program: python -m tests.fuzz.native SECONDS SEED NOTE [FIRST]; NOTE takes the number of the call under way.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.expert_cache.cache_stats import CacheStats
from tests.kernels.packer import FORMATS

NATIVE: Any = kernels.loaded()
"""The extension."""
_FLOAT_CODES = {"none": 0, "bfloat16": 1, "float16": 2, "mxfp4": 3}
SIZES = (1, 2, 3, 5, 16, 17, 33)
WIDTHS = (32, 64, 96, 128, 160, 192, 256)
ODD_FLOATS = (0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e38, 1e-45)
SPOILED = 0.4
ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 1 << 31, 1 << 63, -(1 << 63), 0.5, float("nan"), "text", b"bytes", [], [None], {}, object(),
)  # fmt: skip
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(values: np.ndarray) -> np.ndarray:
    """Return a copy of an array that ends directly before a page without access."""
    page = mmap.PAGESIZE
    space = -(-max(values.nbytes, 1) // page) * page
    mapped = mmap.mmap(-1, space + page)
    whole = np.frombuffer(mapped, np.uint8)
    address = whole.__array_interface__["data"][0]
    if _LIBC.mprotect(address + space, page, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    found = whole[space - values.nbytes : space].view(values.dtype).reshape(values.shape)
    found[...] = values
    if not math.prod(values.shape):
        return values
    return found


@dataclass
class Call:
    """Something to call. kept: what must live as long."""

    function: Callable[..., object]
    arguments: list[Any]
    kept: list[Any] = field(default_factory=list)


class Draw:
    """Random sizes, matrices and arrays from one seed."""

    def __init__(self, seed: int) -> None:
        self.source, self.numbers = random.Random(seed), np.random.default_rng(seed)

    def size(self) -> int:
        return self.source.choice(SIZES)

    def floats(self, *shape: int, kind: Any = np.float32) -> np.ndarray:
        values = self.numbers.standard_normal(shape).astype(np.float32)
        if values.size and self.source.random() < 0.2:
            values.reshape(-1)[self.source.randrange(values.size)] = self.source.choice(ODD_FLOATS)
        with np.errstate(over="ignore"):
            return guarded(values.astype(kind))

    def ints(self, count: int, end: int, kind: Any = np.int32) -> np.ndarray:
        return guarded(self.numbers.integers(0, end, count).astype(kind))

    def matrix(self, rows: int, columns: int, formats: Sequence[QuantSpec] = FORMATS) -> Any:
        """Random bytes in a random format: scales may be anything."""
        fitting = [spec for spec in formats if fits(spec, rows, columns)]
        spec = self.source.choice(fitting)
        data = guarded(self.numbers.integers(0, 256, spec.packed_bytes(rows, columns)).astype(np.uint8))
        bitwidth = 243 if spec.is_ternary else int(spec.bitwidth)
        form = (bitwidth, spec.group_size, spec.symmetric, _FLOAT_CODES[spec.float_type], spec.byte_scales)
        return NATIVE.PackedMatrix(data, rows, columns, *form)

    def expert(self, hidden: int) -> Any:
        width, activation = self.source.choice(WIDTHS), self.source.randrange(3)
        gate = None if activation == 2 else self.matrix(width, hidden)
        rows = [width, width, hidden]
        biases = [self.floats(count) for count in rows] if activation != 2 and self.source.random() < 0.3 else []
        parts = (gate, self.matrix(width, hidden), self.matrix(hidden, width))
        reads_bfloats = bool(NATIVE.bfloat_kernels()) and self.source.random() < 0.5
        return NATIVE.Expert(*parts, activation, 7.0 if activation == 1 else 0.0, biases, reads_bfloats)


def fits(spec: QuantSpec, rows: int, columns: int) -> bool:
    """Return whether a matrix of that shape exists in that format."""
    try:
        spec.packed_bytes(rows, columns)
    except ValueError:
        return False
    return True


def linears(draw: Draw) -> Call:
    tokens, columns = draw.size(), draw.source.choice(WIDTHS)
    rows = [draw.size() for _ in range(draw.source.randint(1, 3))]
    outs = [draw.floats(tokens, count) for count in rows]
    return Call(NATIVE.linears, [[draw.matrix(count, columns) for count in rows], draw.floats(tokens, columns), outs])


def linear_of_bfloats(draw: Draw) -> Call:
    if not NATIVE.bfloat_kernels():
        return linears(draw)
    tokens, rows, columns = draw.size(), draw.size(), draw.size()
    matrix = draw.matrix(rows, columns, [QuantSpec.parse("bf16")])
    return Call(NATIVE.linear_of_bfloats, [matrix, draw.floats(tokens, columns), draw.floats(tokens, rows)])


def dequantize_rows(draw: Draw) -> Call:
    rows, columns, count = draw.size(), draw.source.choice(WIDTHS), draw.size()
    indices = draw.ints(count, rows, np.int64)
    return Call(NATIVE.dequantize_rows, [draw.matrix(rows, columns), indices, draw.floats(count, columns)])


def expert_ffn(draw: Draw) -> Call:
    hidden, tokens, ranks, count = draw.source.choice(WIDTHS), draw.size(), draw.size(), draw.size()
    places = draw.numbers.permutation(tokens * ranks)[:count]
    where = [guarded((part).astype(np.int32)) for part in (places // ranks, places % ranks)]
    return Call(
        NATIVE.expert_ffn,
        [draw.expert(hidden), draw.floats(tokens, hidden), *where, draw.floats(tokens, ranks, hidden)],
    )


def experts_of_token(draw: Draw) -> Call:
    hidden, count = draw.source.choice(WIDTHS), draw.source.randint(1, 4)
    ranks = guarded(draw.numbers.permutation(count).astype(np.int32))
    experts = [draw.expert(hidden)] * count
    return Call(NATIVE.experts_of_token, [experts, draw.floats(1, hidden), ranks, draw.floats(1, count, hidden)])


def rows_of(draw: Draw) -> Call:
    tokens, width, ranks = draw.size(), draw.size(), draw.size()
    return draw.source.choice(
        [
            Call(
                NATIVE.combine,
                [draw.floats(tokens, ranks, width), draw.floats(tokens, ranks), draw.floats(tokens, width)],
            ),
            Call(NATIVE.rms_norm, [draw.floats(tokens, width), draw.floats(width), 1e-5, draw.floats(tokens, width)]),
            Call(
                NATIVE.layer_norm,
                [draw.floats(tokens, width), draw.floats(width), draw.floats(width), 1e-5, draw.floats(tokens, width)],
            ),
            Call(NATIVE.exp, [draw.floats(width), draw.floats(width)]),
            Call(NATIVE.largest, [draw.floats(width), draw.source.randint(0, width)]),
        ]
    )


def route(draw: Draw) -> Call:
    tokens, experts = draw.size(), draw.size()
    top_k = draw.source.randint(1, experts)
    chosen = draw.ints(tokens * top_k, experts).reshape(tokens, top_k)
    return Call(
        NATIVE.route, [draw.floats(tokens, experts), draw.source.random() < 0.5, chosen, draw.floats(tokens, top_k)]
    )


def rope(draw: Draw) -> Call:
    tokens, heads, half, positions = draw.size(), draw.size(), draw.size(), draw.size()
    tables = [draw.floats(positions, half) for _ in range(2)]
    x = draw.floats(tokens, heads, 2 * half + draw.source.choice((0, 2)))
    return Call(NATIVE.rope, [x, *tables, draw.ints(tokens, positions), draw.source.random() < 0.5])


def caches(draw: Draw, kv_heads: int, head: int) -> tuple[int, int, list[np.ndarray]]:
    slots, positions = draw.source.randint(1, 3), draw.size()
    kind = draw.source.choice((np.float32, np.float16))
    return slots, positions, [draw.floats(slots, kv_heads, positions, head, kind=kind) for _ in range(2)]


def store_kv(draw: Draw) -> Call:
    tokens, kv_heads, head = draw.size(), draw.source.randint(1, 4), draw.size()
    slots, positions, arrays = caches(draw, kv_heads, head)
    kv = [draw.floats(tokens, kv_heads, head) for _ in range(2)]
    return Call(NATIVE.store_kv, [*kv, *arrays, draw.ints(tokens, slots), draw.ints(tokens, positions)])


def attention(draw: Draw) -> Call:
    tokens, kv_heads, head = draw.size(), draw.source.randint(1, 3), draw.size()
    heads = kv_heads * draw.source.randint(1, 3)
    slots, positions, arrays = caches(draw, kv_heads, head)
    sinks = draw.floats(heads) if draw.source.random() < 0.3 else None
    has_ends = draw.source.random() < 0.3
    ends = draw.ints(tokens, positions) if has_ends else None
    if ends is not None:
        ends += 1
    bias = draw.floats(heads, 2 * positions - 1) if draw.source.random() < 0.3 else None
    window = 0 if has_ends else draw.source.choice((0, 1, 3, 100))
    places = [draw.ints(tokens, slots), draw.ints(tokens, positions)]
    q, out = draw.floats(tokens, heads, head), draw.floats(tokens, heads, head)
    return Call(NATIVE.attention, [q, *arrays, *places, 0.3, window, out, sinks, ends, bias])


def router_shares(draw: Draw) -> Call:
    columns, rows, count = draw.source.choice(WIDTHS), draw.size(), draw.source.randint(1, 3)
    matrices = [draw.matrix(rows, columns) for _ in range(count)]
    norms = [draw.floats(columns) for _ in range(count)]
    biases = [draw.floats(rows) if draw.source.random() < 0.5 else None for _ in range(count)]
    return Call(
        NATIVE.router_shares, [matrices, norms, 1e-5, draw.floats(1, columns), draw.floats(count, rows), biases]
    )


def attend(draw: Draw) -> Call:
    hidden, head, kv_heads = draw.source.choice(WIDTHS), draw.source.choice((32, 64)), draw.source.randint(1, 2)
    heads, tokens = kv_heads * draw.source.randint(1, 2), draw.size()
    rows = (heads * head, kv_heads * head, kv_heads * head)
    matrices = (*(draw.matrix(count, hidden) for count in rows), draw.matrix(hidden, heads * head))
    if draw.source.random() < 0.2:
        matrices = (*matrices[:2], None, matrices[3])  # values are the products of the keys
    slots, positions, arrays = caches(draw, kv_heads, head)
    biases = tuple(draw.floats(count) if draw.source.random() < 0.3 else None for count in (*rows, hidden))
    rotation = tuple(draw.floats(positions, head // 2) for _ in range(2)) if draw.source.random() < 0.5 else None
    maybe = [draw.floats(hidden) if draw.source.random() < 0.3 else None for _ in range(2)]
    norm = (draw.floats(hidden), *maybe)
    own = NATIVE.AttentionLayer(
        norm, 1e-5, matrices, biases, (None, None), 0.0, rotation, draw.source.random() < 0.5, kv_heads, head, 0.2,
        draw.source.choice((0, 3)), draw.floats(heads) if draw.source.random() < 0.3 else None, None,
        draw.matrix(draw.source.choice((heads, heads * head)), hidden) if draw.source.random() < 0.3 else None,
        draw.source.choice(("sigmoid", "softplus")), draw.floats(head) if draw.source.random() < 0.3 else None, 1.0,
    )  # fmt: skip
    places = draw.numbers.permutation(slots * positions)[:tokens]
    where = [guarded(part.astype(np.int32)) for part in (places // positions, places % positions)]
    return Call(own.attend, [draw.floats(len(places), hidden), *arrays, *where])


def mix(draw: Draw) -> Call:
    hidden, taps, slots = draw.source.choice(WIDTHS), draw.source.randint(2, 4), draw.source.randint(1, 3)
    norm = (draw.floats(hidden), *(draw.floats(hidden) if draw.source.random() < 0.3 else None for _ in range(2)))
    counts = [draw.source.choice((0, 1, 5)) for _ in range(slots)]
    counts[0] = max(counts[0], 1)
    places = [
        guarded(np.repeat(np.arange(slots), counts).astype(np.int32)),
        guarded(np.concatenate([draw.source.randint(0, 3) + np.arange(count) for count in counts]).astype(np.int32)),
    ]
    states = [draw.floats(sum(counts), hidden)]
    kept_at = draw.ints(slots, 8)
    if draw.source.random() < 0.5:
        matrices = draw.matrix(3 * hidden, hidden), draw.matrix(hidden, hidden)
        own = NATIVE.ConvolutionLayer(norm, 1e-5, matrices[0], draw.floats(taps, hidden), matrices[1], 1.0)
        return Call(own.mix, [*states, *(draw.floats(slots, taps - 1, hidden) for _ in range(2)), kept_at, *places])
    key_heads, shared, key, value = (
        draw.source.randint(1, 2),
        draw.source.randint(1, 2),
        draw.source.choice((8, 32)),
        32,
    )
    heads = key_heads * shared
    rows = (key_heads * key, key_heads * key, heads * value, heads * value, heads, heads)
    matrices = (*(draw.matrix(count, hidden) for count in rows), draw.matrix(hidden, heads * value))
    own = NATIVE.DeltaLayer(
        norm, 1e-5, matrices, draw.floats(taps, sum(rows[:3])), draw.floats(heads), draw.floats(heads),
        (draw.floats(key), draw.floats(key)), draw.floats(value), 1e-5, key_heads, heads, 1.0,
    )  # fmt: skip
    shapes = [(slots, taps - 1, sum(rows[:3]))] * 2
    shapes += [(slots, heads, value // 16 * key, 16)] * 2
    return Call(own.mix, [*states, *(draw.floats(*shape) for shape in shapes), kept_at, *places])


def cache_of(draw: Draw) -> tuple[Any, int, list[Any]]:
    """An expert cache without files, whose decisions are asked for one by one."""
    count = draw.source.randint(1, 12)
    columns: dict[str, np.ndarray] = {
        name: guarded(np.zeros(count, np.uint8)) for name in ("state", "is_leased", "is_ahead", "is_seen")
    }
    columns |= {name: guarded(np.zeros(count, np.int64)) for name in ("last_used", "uses")}
    columns |= {"heat": draw.floats(count, kind=np.float64), "prefetches": guarded(np.zeros((2, count), np.int64))}
    columns["counts"] = guarded(np.zeros(len(CacheStats.__slots__), np.int64))
    sizes = [draw.source.choice((1, 4096, 1 << 40)) for _ in range(count)]
    following = [index + 1 if index + 1 < count and draw.source.random() < 0.5 else -1 for index in range(count)]
    policy = draw.source.choice(("lrfu", "lru", "lfu", "edgemoe", "hobbit", "hobbit-printed"))
    layers = draw.source.randint(1, 3)
    eviction = NATIVE.Eviction(
        policy, [0.25] * 4, [draw.source.random() for _ in range(count)],
        [draw.source.randrange(count) for _ in range(count)], layers,
    )  # fmt: skip
    reads = NATIVE.ExpertCache(
        columns, sizes, [draw.source.randrange(layers) for _ in sizes], following, draw.source.randint(1, 3), 1 << 20,
        100.0, eviction,
        draw.source.choice((0, 4096, 1 << 41)), draw.source.choice((0, 4096, 1 << 41)),
        [(-1, 0, size, None, -1, 0, 0) for size in sizes], False, most_queued=draw.source.randint(0, 2),
    )  # fmt: skip
    return reads, count, [columns]


DECISIONS = ("request", "queue_and_lease", "advise", "unlease", "prefetch", "warm", "request_and_queue")
WITHOUT_EXPERTS = ("next_read", "audit", "begin_sequence")


def residency(draw: Draw) -> Call:
    """Many decisions in a row, in any order. `wait` would wait for readers that are not there."""
    reads, count, kept = cache_of(draw)

    def decide() -> None:
        for _ in range(draw.source.randint(1, 30)):
            some = [draw.source.randrange(count) for _ in range(draw.source.randint(0, count))]
            name = draw.source.choice((*DECISIONS, *WITHOUT_EXPERTS))
            for_layer = ("request", "request_and_queue")
            given: Sequence[Any] = (0, some) if name in for_layer else () if name in WITHOUT_EXPERTS else (some,)
            found = getattr(reads, name)(*given)
            if name == "next_read":
                for index in found:
                    draw.source.choice((reads.arrive, reads.fail_read))(index)

    return Call(decide, [], kept)


def one_decision(draw: Draw) -> Call:
    reads, count, kept = cache_of(draw)
    some = [draw.source.randrange(count)]
    name = draw.source.choice((*DECISIONS, "place"))
    given = {"request": [0, some], "request_and_queue": [0, some], "place": [0, 0]}.get(name, [some])
    return Call(getattr(reads, name), given, kept)


def quantizer_step(draw: Draw) -> Call:
    columns, rows = draw.source.choice((32, 64, 96)), draw.size()
    groups, some = columns // 32, draw.source.random() < 0.5
    weights, order = draw.floats(columns, rows), draw.ints(columns, columns, np.int64)
    codes = draw.ints(columns * rows, 256, np.uint8).reshape(columns, rows)
    scales, minima, inverses = (draw.floats(groups, rows) for _ in range(3))
    squares, size = draw.floats(rows, kind=np.float64), groups * (1 + some)
    square, vectors = draw.floats(columns, columns), [draw.floats(size, rows) for _ in range(2)]
    systems, largest = draw.floats(size, size, rows), draw.ints(rows, 256, np.uint8)
    searched = [
        weights,
        draw.floats(columns),
        draw.floats(5),
        2.0,
        1.0,
        some,
        draw.source.random() < 0.5,
        scales,
        minima,
    ]
    return draw.source.choice(
        [
            Call(NATIVE.search_ranges, searched),
            Call(NATIVE.nearest_codes, [weights, scales, minima, 255.0, codes]),
            Call(NATIVE.differences, [weights, codes, scales, minima, order, weights.copy(), squares]),
            Call(NATIVE.code_sums, [weights, codes, 1.0, scales]),
            Call(
                NATIVE.round_columns,
                [weights, square, order, scales, inverses, minima, largest, 1, columns // 2, codes, squares],
            ),
            Call(NATIVE.code_systems, [codes, 1.0, square, draw.floats(groups * some, columns), 0, systems]),
            Call(NATIVE.multiply_systems, [systems, *vectors]),
            Call(NATIVE.solve_systems, [systems, *vectors]),
        ]
    )


BUILDERS: tuple[Callable[[Draw], Call], ...] = (
    linears, linear_of_bfloats, dequantize_rows, expert_ffn, experts_of_token, rows_of, route, rope, store_kv,
    attention, router_shares, attend, mix, residency, one_decision, quantizer_step,
)  # fmt: skip


def spoiled(value: Any, source: random.Random) -> Any:
    """Something else in place of an argument: another shape, type, order, length, or another object."""
    if isinstance(value, np.ndarray) and source.random() < 0.8:
        ways = [
            lambda: guarded(value.reshape(-1)[: max(0, value.size - 1)].copy()),
            lambda: guarded(np.resize(value, (*value.shape[:-1], value.shape[-1] + 1))) if value.ndim else value,
            lambda: guarded(np.resize(value, (value.shape[0] + 1, *value.shape[1:]))) if value.ndim else value,
            lambda: value[:0],
            lambda: value.astype(np.float64),
            lambda: value.astype(np.int8),
            lambda: np.asfortranarray(value),
            lambda: value[..., ::2],
            lambda: value.byteswap().view(value.dtype.newbyteorder()),
            lambda: guarded(np.full(value.shape, -1).astype(value.dtype)),
            lambda: guarded(np.full_like(value, np.iinfo(value.dtype).max if value.dtype.kind in "iu" else np.inf)),
        ]
        with np.errstate(invalid="ignore", over="ignore"):
            return source.choice(ways)()
    if isinstance(value, list) and value and source.random() < 0.8:
        changed = list(value)
        at = source.randrange(len(changed))
        way = source.randrange(4)
        if way == 0:
            changed.append(changed[at])
        elif way == 1:
            del changed[at]
        elif way == 2:
            changed[at] = source.choice(ODD)
        else:
            changed[at] = spoiled(changed[at], source)
        return changed
    return source.choice(ODD)


def one_call(seed: int, number: int) -> str:
    """Make one call and say how it ended. Raises whatever is neither a result nor a refusal."""
    draw = Draw(seed * 1_000_003 + number)
    NATIVE.select(draw.source.choice(NATIVE.available()))
    NATIVE.set_threads(draw.source.randint(1, 3))
    call = draw.source.choice(BUILDERS)(draw)
    is_spoiled = bool(call.arguments) and draw.source.random() < SPOILED
    if is_spoiled:
        at = draw.source.randrange(len(call.arguments))
        call.arguments[at] = spoiled(call.arguments[at], draw.source)
    try:
        call.function(*call.arguments)
    except (ValueError, TypeError):
        if not is_spoiled:
            raise
        return "refused"
    return "accepted" if is_spoiled else "computed"


def main(seconds: float, seed: int, note: Path, first: int) -> None:
    """Call until the time is over."""
    end, counts, number = time.monotonic() + seconds, {"computed": 0, "refused": 0, "accepted": 0}, first
    with note.open("w") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(f"{seed} {number}\n")
            file.flush()
            counts[one_call(seed, number)] += 1
            number += 1
    print(f"{number - first} calls: {counts}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
