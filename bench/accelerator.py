"""Experts on an accelerator: ``python bench/accelerator.py BUNDLE --text FILE --accelerator cuda [--results FOLDER]``.

One engine, opened once; strategies take turns on it, round by round, so that all of them see the same machine: the CPU
alone; with dense weights on the device every missing expert copied, none copied (static placement), the published rule,
the planner; and the planner with dense weights on the CPU. Measured: tokens/s of decoding, time to the first token of
prompts of 512 to 4,096 tokens, and steps/s of beam search at widths of 4, 8 and 12.
The host's cache should hold all experts (the default), or storage is measured with the rest; its misses are told.
Prints a Markdown table of medians; --results keeps every time. On `torch-cpu` it shows its
form and nothing else.
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

# As the console script does, before torch is there: threads that spin while they wait starve the kernels' own.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from moec.runtime import load
from moec.runtime.accelerator.cooperative import CooperationCounts
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import Cooperation
from moec.runtime.simulation.accelerator_workload import STRATEGIES

BEAM_PROMPT = 32
DENSE_HERE = "planner, dense weights on the CPU"
ARMS: dict[str, Cooperation | None] = {**STRATEGIES, DENSE_HERE: "auto"}


def tokens_of(engine: Engine, path: Path, count: int) -> list[int]:
    """So many tokens of a text, begun again where it is too short."""
    found = engine.encode(path.read_text(encoding="utf-8"))
    if not found:
        sys.exit(f"error: `{path}` is empty")
    return (found * -(-count // len(found)))[:count]


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def first_token(engine: Engine, tokens: list[int]) -> None:
    engine.begin_sequence()
    engine.model.logits(engine.prefill(tokens)[-1:])


def decode(engine: Engine, tokens: list[int], count: int) -> float:
    """Tokens per second behind a short prompt, on given tokens."""
    engine.begin_sequence()
    engine.prefill(tokens[:BEAM_PROMPT])
    elapsed = 0.0
    for position in range(BEAM_PROMPT, BEAM_PROMPT + count):
        token = tokens[position % len(tokens)]
        elapsed += seconds(partial(engine.decode, [token], [0], [position]))
    return count / elapsed


def beams(engine: Engine, tokens: list[int], width: int, count: int) -> float:
    """Steps per second of a beam search, its short prefill included in the time."""
    found = list[Any]()
    elapsed = seconds(lambda: found.extend(beam_search(engine, tokens[:BEAM_PROMPT], count, BeamOptions(width))))
    return max(len(beam.tokens) for beam in found) / elapsed


def measure(engine: Engine, tokens: list[int], options: argparse.Namespace) -> dict[str, float]:
    """One round of one strategy."""
    told = {"tokens/s": decode(engine, tokens, options.tokens)}
    for length in options.prompts:
        told[f"TTFT {length} [s]"] = seconds(partial(first_token, engine, tokens[:length]))
    for width in options.beams:
        told[f"beams {width} [steps/s]"] = beams(engine, tokens, width, options.tokens)
    return told


def run(engine: Engine, tokens: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds of all strategies; a round in front of them fills the host's cache and is not told."""
    accelerator, rows = engine.model.accelerator, list[dict[str, Any]]()
    if accelerator is None:
        sys.exit("error: no accelerator")
    for number in range(-1, options.rounds):
        for strategy, cooperation in ARMS.items():
            engine.model.accelerator = accelerator
            engine.place_dense(on_device=cooperation is not None and strategy != DENSE_HERE)
            engine.model.accelerator = accelerator if cooperation is not None else None
            accelerator.cooperation, accelerator.counts = cooperation or "cpu", CooperationCounts()
            misses = engine.cache.stats.misses
            told = measure(engine, tokens, options)
            print(f"round {number + 1} of {options.rounds}, {strategy}", file=sys.stderr)
            if number < 0:
                continue
            own = {"experts": accelerator.to_plain()["experts"], "cache_misses": engine.cache.stats.misses - misses}
            rows.append({"round": number, "strategy": strategy, **own, "measured": told})
    engine.model.accelerator = accelerator
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the rounds."""
    names = list(rows[0]["measured"])
    lines = [f"| | {' | '.join(names)} | resident / copied / CPU |", "|---" * (len(names) + 2) + "|"]
    for strategy in ARMS:
        own = [row for row in rows if row["strategy"] == strategy]
        cells = [f"{statistics.median(row['measured'][name] for row in own):.4g}" for name in names]
        experts = own[0]["experts"]
        counts = f"{experts['resident']} / {experts['copied']} / {experts['cpu']}"
        lines.append(f"| {strategy} | {' | '.join(cells)} | {counts if ARMS[strategy] else '-'} |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="what prompts and decoded tokens are taken from")
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument("--accelerator-memory", help="of the device; half of the experts is a good case")
    parser.add_argument("--expert-cache", default="100%", help="of the host")
    parser.add_argument("--prompts", type=numbers, default=[512, 1024, 2048, 4096])
    parser.add_argument("--beams", type=numbers, default=[4, 8, 12])
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each measurement")
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
        told = {"mode": engine.mode, "accelerator": engine.model.accelerator.to_plain(), "rows": rows}  # type: ignore[union-attr]
    print(table(rows))
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "accelerator.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
