"""The expert cache in Python and in the extension: ``python bench/native_cache.py BUNDLE TEXT --expert-cache 61%``.

Two engines in one process decode the same forced tokens in turns of twenty, each first in every other turn, so that
both meet the same state of the machine. Prints medians per token and the quotient of the times, paired by turn. A
minute for a gigabyte of experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moec.runtime import Engine, load, native_cache

PROMPT_TOKENS, WARM_UP_TOKENS, TURN_TOKENS = 148, 10, 20
NAMES = ("ms", "waiting", "experts", "dense", "everything else", "storage idle", "reads", "GB/s while reading")


def opened(path: Path, expert_cache: str, policies: tuple[str, ...]) -> Engine:
    """An engine whose cache is in the extension under these policies alone."""
    native_cache.NATIVE_POLICIES = policies  # type: ignore[assignment]
    return load(path, expert_cache=expert_cache, context=1024)


def turn(engine: Engine, tokens: list[int], first: int, count: int) -> tuple[float, ...]:
    """Decode tokens from a position on; NAMES per token."""
    cache, times, started = engine.cache.stats.copy(), engine.model.times.copy(), time.perf_counter_ns()
    for position in range(first, first + count):
        engine.decode([tokens[position]], [0], [position])
    elapsed_ns = time.perf_counter_ns() - started
    gained, kernels = engine.cache.stats.since(cache), engine.model.times.since(times)
    parts = (gained.stall_ns, kernels.experts_ns, kernels.dense_ns)
    each = (elapsed_ns, *parts, elapsed_ns - sum(parts), elapsed_ns - gained.busy_ns)
    rate = gained.bytes_read / gained.busy_ns if gained.busy_ns else 0.0
    return (*(part / count / 1e6 for part in each), gained.reads / count, rate)


def print_turns(rows: Mapping[str, Sequence[tuple[float, ...]]], own: str, other: str) -> None:
    """Medians of NAMES for each side, and the quotient of their times, turn by turn."""
    for name, turns in rows.items():
        medians = [statistics.median(values) for values in zip(*turns, strict=True)]
        print(f"{name}: " + ", ".join(f"{what} {value:.2f}" for what, value in zip(NAMES, medians, strict=True)))
    quotients = [one[0] / another[0] for one, another in zip(rows[own], rows[other], strict=True)]
    low, middle, high = statistics.quantiles(quotients, n=4)
    print(f"{own} over {other}: {middle:.3f} ({low:.3f} to {high:.3f}, quartiles of {len(quotients)} turns)")


def main() -> None:
    """Read the command line, decode, print."""
    parser = argparse.ArgumentParser(description="The cache in Python and in the extension, in turns.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--expert-cache", default="61%")
    parser.add_argument("--turns", type=int, default=14)
    options = parser.parse_args()
    engines = {
        "python": opened(options.bundle, options.expert_cache, ()),
        "native": opened(options.bundle, options.expert_cache, ("lrfu",)),
    }
    tokens = engines["python"].encode(options.text.read_text(encoding="utf-8"))
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.begin_sequence()
        engine.prefill(tokens[:PROMPT_TOKENS])
        engine.cache.finish_warming()
        turn(engine, tokens, PROMPT_TOKENS, WARM_UP_TOKENS)
    for number in range(options.turns):
        first = PROMPT_TOKENS + WARM_UP_TOKENS + number * TURN_TOKENS
        for name in engines if number % 2 == 0 else reversed(engines):
            rows[name].append(turn(engines[name], tokens, first, TURN_TOKENS))
    print_turns(rows, "native", "python")


if __name__ == "__main__":
    main()
