"""Decoding in turns: several engines, or one in several ways, over the same forced tokens in one process.

Processes that run one after the other meet different states of a shared machine. In turns all meet the same state: the
first of a round changes from round to round, and times are divided within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from moec.runtime import Engine

PROMPT_TOKENS, WARM_UP_TOKENS, TURN_TOKENS = 148, 10, 20
FIRST_POSITION = PROMPT_TOKENS + WARM_UP_TOKENS
NAMES = ("ms", "waiting", "experts", "dense", "everything else", "storage idle", "reads", "GB/s while reading")
Rows = dict[str, list[tuple[float, ...]]]


def begin(engine: Engine, tokens: list[int]) -> None:
    """Read the prompt, fill the cache, and decode WARM_UP_TOKENS tokens."""
    engine.begin_sequence()
    engine.prefill(tokens[:PROMPT_TOKENS])
    engine.cache.finish_warming()
    turn(engine, tokens, PROMPT_TOKENS, WARM_UP_TOKENS)


def turn(engine: Engine, tokens: list[int], first: int, count: int = TURN_TOKENS) -> tuple[float, ...]:
    """Decode tokens from a position on. Return the figures of NAMES, per token."""
    cache, times, started = engine.cache.stats.copy(), engine.model.times.copy(), time.perf_counter_ns()
    for position in range(first, first + count):
        engine.decode([tokens[position]], [0], [position])
    elapsed_ns = time.perf_counter_ns() - started
    gained, kernels = engine.cache.stats.since(cache), engine.model.times.since(times)
    parts = (gained.stall_ns, kernels.experts_ns, kernels.dense_ns)
    each = (elapsed_ns, *parts, elapsed_ns - sum(parts), elapsed_ns - gained.busy_ns)
    rate = gained.bytes_read / gained.busy_ns if gained.busy_ns else 0.0
    return (*(part / count / 1e6 for part in each), gained.reads / count, rate)


def decode_in_turns(engines: Mapping[str, Engine], tokens: list[int], rounds: int) -> Rows:
    """Let each engine decode the same tokens in every round. The first of a round comes last in the next."""
    rows: Rows = {name: [] for name in engines}
    names = list(engines)
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            rows[name].append(turn(engines[name], tokens, FIRST_POSITION + number * TURN_TOKENS))
    return rows


def print_turns(rows: Mapping[str, Sequence[tuple[float, ...]]], base: str) -> None:
    """Print medians of the figures of NAMES, and quotients of times.

    base: the row that the times of all others are divided by, round by round.
    """
    for name, own in rows.items():
        medians = [statistics.median(values) for values in zip(*own, strict=True)]
        print(f"{name}: " + ", ".join(f"{what} {value:.2f}" for what, value in zip(NAMES, medians, strict=True)))
    for name, own in rows.items():
        if name != base:
            quotients = [one[0] / other[0] for one, other in zip(own, rows[base], strict=True)]
            low, middle, high = statistics.quantiles(quotients, n=4)
            print(f"{name} over {base}: {middle:.3f} ({low:.3f} to {high:.3f}, quartiles of {len(quotients)} rounds)")
