"""Speed of the kernels on this machine, next to the numpy float32 product.

    python -m bench.kernels.speed [--json] [--kernels NAME]

A figure is the best of several calls for each format, shape, token count and thread count. One call before them is not
counted. GFLOP/s counts 2 N K T. GB/s counts packed bytes once per call (numpy: the float32 matrix). Compare figures of
one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels

FORMATS = (
    "q1g64", "q1g64b", "q1.6g128s", "q2g64", "q2g64b", "q2g32", "q2g32b", "q3g64", "q3g64b", "q4g64", "q4g32s", "mxfp4",
    "q5g64", "q5g64b", "q6g64", "q8g64", "bf16",
)  # fmt: skip
SHAPES = ((256, 256), (1024, 2048), (2048, 1024))
TOKENS = (1, 16, 64, 96)
MANY_EXPERTS = 128  # more than a last-level cache holds
THREADS = (1, 2)
SECONDS_PER_CASE = 0.02


@dataclass(frozen=True)
class Result:
    """One measurement. gflop_per_s and gb_per_s are decimal."""

    operation: str
    format: str
    rows: int
    columns: int
    tokens: int
    threads: int
    gflop_per_s: float
    gb_per_s: float


def best_seconds(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call, of at least five over SECONDS_PER_CASE."""
    call()
    best, end, count = float("inf"), time.perf_counter() + SECONDS_PER_CASE, 0
    while count < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def random_matrix(rows: int, columns: int, spec: QuantSpec) -> kernels.PackedMatrix:
    """Return a matrix of random bytes below 60, which make finite small scales in every format."""
    data = np.random.default_rng(0).integers(0, 60, spec.packed_bytes(rows, columns)).astype(np.uint8)
    return kernels.PackedMatrix(data, rows, columns, spec)


def random_expert(width: int, hidden: int, spec: QuantSpec) -> kernels.Expert:
    """Return an expert of random bytes, with a gate."""
    gate, up = random_matrix(width, hidden, spec), random_matrix(width, hidden, spec)
    return kernels.Expert(gate, up, random_matrix(hidden, width, spec))


def expert_bytes(width: int, hidden: int, spec: QuantSpec) -> int:
    """Return the packed bytes of an expert with a gate."""
    return 2 * spec.packed_bytes(width, hidden) + spec.packed_bytes(hidden, width)


def result(
    operation: str, text: str, shape: tuple[int, int, int], threads: int, work: tuple[float, float, float]
) -> Result:
    """Return a result. shape: rows, columns, tokens; work: seconds, floating-point operations, bytes."""
    seconds, flops, size = work
    return Result(operation, text, *shape, threads, round(flops / seconds / 1e9, 2), round(size / seconds / 1e9, 2))


def measure_linear(text: str, rows: int, columns: int, tokens: int, threads: int) -> Result:
    matrix = random_matrix(rows, columns, QuantSpec.parse(text))
    x, out = np.ones((tokens, columns), np.float32), np.empty((tokens, rows), np.float32)
    seconds = best_seconds(lambda: kernels.linear(matrix, x, out))
    return result(
        "linear", text, (rows, columns, tokens), threads, (seconds, 2 * rows * columns * tokens, matrix.data.size)
    )


def measure_expert(text: str, width: int, hidden: int, tokens: int, threads: int) -> Result:
    spec = QuantSpec.parse(text)
    expert = random_expert(width, hidden, spec)
    x, out = np.ones((tokens, hidden), np.float32), np.empty((tokens, 1, hidden), np.float32)
    index, ranks = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
    seconds = best_seconds(lambda: kernels.expert_ffn(expert, x, index, ranks, out))
    work = (seconds, 6 * width * hidden * tokens, expert_bytes(width, hidden, spec))
    return result("expert_ffn", text, (width, hidden, tokens), threads, work)


def measure_experts_from_memory(text: str, width: int, hidden: int, tokens: int, threads: int) -> Result:
    """Measure one of MANY_EXPERTS experts that run one after the other, so that weights come from memory."""
    spec = QuantSpec.parse(text)
    experts = [random_expert(width, hidden, spec) for _ in range(MANY_EXPERTS)]
    x, out = np.ones((tokens, hidden), np.float32), np.empty((tokens, 1, hidden), np.float32)
    index, ranks = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)

    def one_after_the_other() -> None:
        for expert in experts:
            kernels.expert_ffn(expert, x, index, ranks, out)

    seconds = best_seconds(one_after_the_other) / MANY_EXPERTS
    work = (seconds, 6 * width * hidden * tokens, expert_bytes(width, hidden, spec))
    return result("from memory", text, (width, hidden, tokens), threads, work)


def measure_numpy(rows: int, columns: int, tokens: int) -> Result:
    weights, x = np.ones((rows, columns), np.float32), np.ones((tokens, columns), np.float32)
    out = np.empty((tokens, rows), np.float32)
    seconds = best_seconds(lambda: np.matmul(x, weights.T, out=out))
    work = (seconds, 2 * rows * columns * tokens, weights.nbytes)
    return result("numpy matmul", "float32", (rows, columns, tokens), 0, work)


def measure_attention(context: int, threads: int) -> Result:
    heads, kv_heads, size = 16, 4, 128
    cache = np.ones((1, kv_heads, context, size), np.float32)
    q, index = np.ones((1, heads, size), np.float32), np.zeros(1, np.int32)
    position, out = np.array([context - 1], np.int32), np.empty((1, heads, size), np.float32)
    places, rule = kernels.TokenPlaces(index, position), kernels.AttentionRule(0.1)
    seconds = best_seconds(lambda: kernels.attention(q, cache, cache, places, rule, out))
    work = (seconds, 4 * heads * size * context, 2 * cache.nbytes)
    return result("attention", "float32", (heads, context, 1), threads, work)


def measure_all() -> Iterator[Result]:
    for threads in THREADS:
        kernels.set_threads(threads)
        for rows, columns in SHAPES:
            for tokens in TOKENS:
                for text in FORMATS:
                    yield measure_linear(text, rows, columns, tokens, threads)
        for tokens in TOKENS:
            yield measure_expert("q4g64", 1024, 1024, tokens, threads)
            yield measure_expert("q4g32s", 1024, 2048, tokens, threads)
            yield measure_experts_from_memory("q4g32s", 1024, 2048, tokens, threads)
        yield measure_attention(1024, threads)
    for rows, columns in SHAPES:
        for tokens in TOKENS:
            yield measure_numpy(rows, columns, tokens)


def main() -> None:
    """Read the command line and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description="measure the kernels on this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kernels", metavar="NAME", help=f"force one of {', '.join(kernels.available())}")
    options = parser.parse_args()
    if options.kernels:
        kernels.select(options.kernels)
    conditions = {
        "kernels": kernels.active(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
    }
    if options.json:
        print(json.dumps({**conditions, "results": [asdict(item) for item in measure_all()]}))
        return
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(f"{'operation':<13}{'format':<9}{'N':>6}{'K':>6}{'T':>5}{'threads':>9}{'GFLOP/s':>9}{'GB/s':>8}")
    for item in measure_all():
        threads = item.threads or "own"
        shape = f"{item.rows:>6}{item.columns:>6}{item.tokens:>5}{threads:>9}"
        print(f"{item.operation:<13}{item.format:<9}{shape}{item.gflop_per_s:>9.1f}{item.gb_per_s:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
