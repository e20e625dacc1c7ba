"""Speed of formats that are measured in turn, so that all meet the same state of a shared machine.

    python -m bench.kernels.formats_in_turn [--kernels NAME] [--formats q4g64,q5g64] [--rounds 30] [--json]

Each round calls every format with the same shape and token count, on one thread. `memory` goes through more matrices
than a last-level cache holds. The table has the median rate, and the median and quartiles of the ratio of times to the
first format in the same round. GFLOP/s counts 2 N K T, GB/s the packed bytes. Times are those of the thread on its
processor, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels

from .speed import random_matrix

SHAPE = (1024, 2048)
TOKENS = (1, 16)
SECONDS_PER_CALL = 0.004
MEMORY_BYTES = 400 * 1000 * 1000
"""Bytes of the matrices that are read from memory: more than a last-level cache holds."""


@dataclass(frozen=True)
class Rate:
    """One line of the table. `ratio`: first quartile, median and third quartile."""

    place: str
    format: str
    tokens: int
    gflop_per_s: float
    gb_per_s: float
    ratio: tuple[float, float, float]


def seconds_of(call: Callable[[], None], least: float) -> float:
    """Return the least processor seconds of a call, of as many as take `least` seconds together, but at least one."""
    end, best = time.thread_time() + least, float("inf")
    while best == float("inf") or time.thread_time() < end:
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


def caller(matrices: list[kernels.PackedMatrix], tokens: int) -> Callable[[], None]:
    """Return a call that multiplies the matrices one after the other."""
    rows, columns = SHAPE
    x, out = np.ones((tokens, columns), np.float32), np.empty((tokens, rows), np.float32)

    def multiply() -> None:
        for matrix in matrices:
            kernels.linear(matrix, x, out)

    return multiply


def measure(formats: list[str], tokens: int, rounds: int, from_memory: bool) -> Iterator[Rate]:
    """Yield the rate of each format."""
    specs = [QuantSpec.parse(text) for text in formats]
    counts = [MEMORY_BYTES // spec.packed_bytes(*SHAPE) + 1 if from_memory else 1 for spec in specs]
    calls = [
        caller([random_matrix(*SHAPE, spec) for _ in range(count)], tokens)
        for spec, count in zip(specs, counts, strict=True)
    ]
    least = 0.0 if from_memory else SECONDS_PER_CALL
    for call in calls:
        call()
    times = np.array([[seconds_of(call, least) for call in calls] for _ in range(rounds)]) / counts
    for index, spec in enumerate(specs):
        quartiles = np.percentile(times[:, index] / times[:, 0], (25, 50, 75))
        seconds = float(np.median(times[:, index]))
        gflop_per_s = round(2e-9 * SHAPE[0] * SHAPE[1] * tokens / seconds, 2)
        gb_per_s = round(1e-9 * spec.packed_bytes(*SHAPE) / seconds, 2)
        low, middle, high = (round(float(value), 3) for value in quartiles)
        place = "memory" if from_memory else "cache"
        yield Rate(place, formats[index], tokens, gflop_per_s, gb_per_s, (low, middle, high))


def main() -> None:
    """Read the command line and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description="measure formats in turn")
    parser.add_argument("--kernels", metavar="NAME", help=f"force one of {', '.join(kernels.available())}")
    parser.add_argument("--formats", default="q4g64,q5g64,q6g64,q8g64,q3g64,mxfp4", help="ratios are to the first")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.kernels:
        kernels.select(options.kernels)
    kernels.set_threads(1)
    formats, lines = options.formats.split(","), list[Rate]()
    for from_memory in (False, True):
        for tokens in TOKENS:
            rounds = options.rounds if not from_memory else max(3, options.rounds // 4)
            lines += measure(formats, tokens, rounds, from_memory)
    if options.json:
        print(json.dumps({"kernels": kernels.active(), "load": os.getloadavg(), "rates": [asdict(x) for x in lines]}))
        return
    print(f"kernels {kernels.active()}, load {os.getloadavg()[0]:.1f}, {SHAPE[0]} x {SHAPE[1]}, one thread")
    print(f"{'from':<8}{'format':<9}{'T':>3}{'GFLOP/s':>9}{'GB/s':>8}  time over {formats[0]} (quartiles)")
    for line in lines:
        low, middle, high = line.ratio
        figures = f"{line.gflop_per_s:>9.1f}{line.gb_per_s:>8.2f}  {middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"{line.place:<8}{line.format:<9}{line.tokens:>3}{figures}")


if __name__ == "__main__":
    main()
