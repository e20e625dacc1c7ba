"""Prompt and decode time of a bundle with experts that read float32 and bfloat16, in turns in one process.

    python -m bench.runs.prompts_in_turns BUNDLE TEXT [--prompts 16,128,512] [--rounds 20] [--threads 1]

Each round reads the same prompt with both engines and then decodes a few of the tokens after it. The first engine of a
round is the second of the next. All experts are in memory. With one thread the times are those of the thread on its
processor, so that other programs do not count; with more they are those of the clock. Prints medians, and the median
and quartiles of the quotient float32 over bfloat16 within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from moec.runtime import Engine, kernels, load

DECODED = 8
TYPES = ("float32", "bfloat16")


def seconds(engine: Engine, tokens: list[int], prompt: int, threads: int) -> tuple[float, float]:
    """Return the seconds of a prompt, and of one decoded token after it."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    engine.begin_sequence()
    started = clock()
    engine.prefill(tokens[:prompt])
    read = clock()
    for position in range(prompt, prompt + DECODED):
        engine.decode([tokens[position]], [0], [position])
    return read - started, (clock() - read) / DECODED


def measure(engines: dict[str, Engine], tokens: list[int], prompt: int, rounds: int, threads: int) -> dict[str, Any]:
    """Return the figures of one length of prompts."""
    times_of: dict[str, list[tuple[float, float]]] = {name: [] for name in TYPES}
    for number in range(rounds + 1):
        for name in TYPES if number % 2 == 0 else reversed(TYPES):
            times = seconds(engines[name], tokens, prompt, threads)
            if number > 0:  # the first round only brings the weights into memory
                times_of[name].append(times)
    record: dict[str, Any] = {"prompt_tokens": prompt, "rounds": rounds}
    for place, what in enumerate(("prompt", "token")):
        columns = {name: [times[place] for times in times_of[name]] for name in TYPES}
        quotients = [one / other for one, other in zip(columns["float32"], columns["bfloat16"], strict=True)]
        record[f"{what}_ms"] = {name: round(1e3 * statistics.median(values), 3) for name, values in columns.items()}
        record[f"{what}_quotient"] = [round(value, 3) for value in statistics.quantiles(quotients, n=4)]
    return record


def main() -> None:
    """Read the command line, measure, and print one JSON object per length."""
    parser = argparse.ArgumentParser(description="Prompts of one bundle with two types of activations, in turns.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompts", default="16,128,512")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    same: dict[str, Any] = {"context": 2048, "threads": options.threads, "expert_cache": "100%"}
    engines = {name: load(options.bundle, **same, lossy=f"expert-activations {name}") for name in TYPES}
    tokens = engines["float32"].encode(options.text.read_text(encoding="utf-8"))
    for engine in engines.values():
        engine.cache.finish_warming()
    used = {"kernels": kernels.active(), "products": kernels.bfloat_kernels(), "load": os.getloadavg()[0]}
    print(json.dumps({**used, "threads": options.threads}), flush=True)
    for prompt in map(int, options.prompts.split(",")):
        print(json.dumps(measure(engines, tokens, prompt, options.rounds, options.threads)), flush=True)


if __name__ == "__main__":
    main()
