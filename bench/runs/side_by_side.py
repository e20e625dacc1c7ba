"""Compare options in turns.

    python -m bench.runs.side_by_side BUNDLE TEXT expert_cache=75% expert_cache=75%,prefetch=off

Each setting has an engine. All engines run in one process and decode the same forced tokens in turns. A setting
is a list of options of `moec.runtime.RuntimeOptions`, NAME=VALUE, separated by commas. Memory must hold all engines.
Prints medians per token, and the times of each setting divided by those of the first, paired by round.

Processes that run one after the other meet different states of a shared machine. In turns all meet the same state: the
first of a round changes from round to round, and times are divided within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moec.runtime import Engine, load

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


def setting(text: str) -> tuple[str, dict[str, Any]]:
    """Return a text like `readers=2,prefetch=off`, and its options as keywords of `load`.

    Raises argparse.ArgumentTypeError for another form. `true` and `false` become booleans, digits integers.
    """
    pairs = [part.split("=", 1) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of NAME=VALUE separated by commas")
    words: dict[str, Any] = {"true": True, "false": False}
    return text, {name: int(value) if value.isdecimal() else words.get(value, value) for name, value in pairs}


def main() -> None:
    """Read the command line, decode and print."""
    parser = argparse.ArgumentParser(description="Compare options in turns.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("settings", nargs="+", type=setting, metavar="NAME=VALUE,...", help="options of one engine")
    parser.add_argument("--rounds", type=int, default=14)
    options = parser.parse_args()
    if options.rounds < 2 or len(dict(options.settings)) < len(options.settings):
        parser.error("expected at least two rounds, and no setting twice")
    context = FIRST_POSITION + options.rounds * TURN_TOKENS
    engines = dict[str, Engine]()
    for name, keywords in options.settings:
        engines[name] = load(options.bundle, **({"context": context} | keywords))
    base = options.settings[0][0]
    tokens = engines[base].encode(options.text.read_text(encoding="utf-8"))
    if len(tokens) < context:
        parser.error(f"{options.text} has {len(tokens)} tokens, {context} are needed: use fewer `--rounds`")
    for engine in engines.values():
        begin(engine, tokens)
    print_turns(decode_in_turns(engines, tokens, options.rounds), base)


if __name__ == "__main__":
    main()
