"""Experts on an accelerator.

    python -m bench.accelerator.measured BUNDLE --text FILE --accelerator cuda [--results FOLDER]

One engine is opened once. The strategies take turns on it in every round, so that all of them meet the same state of
the machine. They are:

* The CPU alone.
* With dense weights on the device: every missing expert copied, none copied (static placement), the published rule,
  and the planner.
* The planner with dense weights on the CPU.

Measured are tokens/s of decoding, the time to the first token of prompts of 512 to 4,096 tokens, and steps/s of beam
search at widths of 4, 8 and 12. The host's cache should hold all experts (the default). Otherwise the figures include
storage, and --results has the cache misses. Prints a Markdown table of medians; --results keeps every time. On
`torch-cpu` the figures mean nothing; it only shows the form of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Set before torch is imported, as in the console script. Threads that spin while they wait slow the kernels down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from bench.accelerator.workload import STRATEGIES
from moec.runtime import load
from moec.runtime.accelerator.cooperative import CooperationCounts
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import Cooperation

BEAM_PROMPT = 32
DENSE_HERE = "planner, dense weights on the CPU"
ARMS: dict[str, Cooperation | None] = {**STRATEGIES, DENSE_HERE: "auto"}


def tokens_of(engine: Engine, path: Path, count: int) -> list[int]:
    """Return `count` tokens of a text file, repeated if it is too short."""
    encoded = engine.encode(path.read_text(encoding="utf-8"))
    if not encoded:
        sys.exit(f"error: `{path}` is empty")
    return (encoded * -(-count // len(encoded)))[:count]


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def first_token(engine: Engine, tokens: list[int]) -> None:
    engine.begin_sequence()
    engine.model.logits(engine.prefill(tokens)[-1:])


def decode(engine: Engine, tokens: list[int], count: int) -> float:
    """Return decoded tokens per second after a short prompt, over given tokens."""
    engine.begin_sequence()
    engine.prefill(tokens[:BEAM_PROMPT])
    elapsed = 0.0
    for position in range(BEAM_PROMPT, BEAM_PROMPT + count):
        token = tokens[position % len(tokens)]
        elapsed += seconds(partial(engine.decode, [token], [0], [position]))
    return count / elapsed


def beams(engine: Engine, tokens: list[int], width: int, count: int) -> float:
    """Return steps per second of a beam search. The time includes its short prefill."""
    times = list[Any]()
    elapsed = seconds(lambda: times.extend(beam_search(engine, tokens[:BEAM_PROMPT], count, BeamOptions(width))))
    return max(len(beam.tokens) for beam in times) / elapsed


def measure(engine: Engine, tokens: list[int], options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one round of one strategy."""
    figures = {"tokens/s": decode(engine, tokens, options.tokens)}
    for length in options.prompts:
        figures[f"TTFT {length} [s]"] = seconds(partial(first_token, engine, tokens[:length]))
    for width in options.beams:
        figures[f"beams {width} [steps/s]"] = beams(engine, tokens, width, options.tokens)
    return figures


def run(engine: Engine, tokens: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all rounds of all strategies. A first round fills the host's cache and is not reported."""
    accelerator, rows = engine.accelerator, list[dict[str, Any]]()
    if accelerator is None:
        sys.exit("error: no accelerator")
    for number in range(-1, options.rounds):
        for strategy, cooperation in ARMS.items():
            engine.place_dense(on_device=cooperation is not None and strategy != DENSE_HERE)
            engine.model.accelerator = accelerator if cooperation is not None else None
            accelerator.cooperation, accelerator.counts = cooperation or "cpu", CooperationCounts()
            misses = engine.cache.stats.misses
            figures = measure(engine, tokens, options)
            print(f"round {number + 1} of {options.rounds}, {strategy}", file=sys.stderr)
            if number < 0:
                continue
            counts = {"experts": accelerator.to_plain()["experts"], "cache_misses": engine.cache.stats.misses - misses}
            rows.append({"round": number, "strategy": strategy, **counts, "measured": figures})
    engine.model.accelerator = accelerator
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of medians over the rounds."""
    names = list(rows[0]["measured"])
    lines = [f"| | {' | '.join(names)} | resident / copied / CPU |", "|---" * (len(names) + 2) + "|"]
    for strategy in ARMS:
        of_strategy = [row for row in rows if row["strategy"] == strategy]
        cells = [f"{statistics.median(row['measured'][name] for row in of_strategy):.4g}" for name in names]
        experts = of_strategy[0]["experts"]
        counts = f"{experts['resident']} / {experts['copied']} / {experts['cpu']}"
        lines.append(f"| {strategy} | {' | '.join(cells)} | {counts if ARMS[strategy] else '-'} |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="file with the text of prompts and decoded tokens")
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument("--accelerator-memory", help="memory of the device; half of the experts is a good case")
    parser.add_argument("--expert-cache", default="100%", help="expert cache of the host")
    parser.add_argument("--prompts", type=numbers, default=[512, 1024, 2048, 4096])
    parser.add_argument("--beams", type=numbers, default=[4, 8, 12])
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="folder for accelerator.json")
    options = parser.parse_args()
    longest = max([*options.prompts, BEAM_PROMPT + options.tokens])
    engine = load(
        options.bundle,
        accelerator=options.accelerator,
        accelerator_memory=options.accelerator_memory,
        accelerator_dense="device",
        expert_cache=options.expert_cache,
        context=longest,
        slots=max([1, *options.beams]),
    )
    with engine:
        print(engine.mode, file=sys.stderr)
        rows = run(engine, tokens_of(engine, options.text, longest), options)
        state = None if engine.accelerator is None else engine.accelerator.to_plain()
        record = {"mode": engine.mode, "accelerator": state, "rows": rows}
    print(table(rows))
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "accelerator.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
