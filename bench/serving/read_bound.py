"""The bytes that a pass of several streams reads, next to the least possible ones and to those of one stream.

    python -m bench.serving.read_bound BUNDLE TEXT --streams 16 --tokens 48 --shares 50% 25%

Streams of real text are decoded with all experts in memory, and their choices are recorded. A cache that knows all
later passes then serves them. It drops the expert that is needed again last, which may be the one that was just used.
No cache of this size reads less. Then the same streams are decoded with this share of the experts.

Prints one JSON object per number of streams and share. It has means of the passes after the first ones: experts that a
pass requests, those that it reads at least, and those that it read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moec.runtime import load
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import parse_cache
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import Predictor

NEVER = np.iinfo(np.int64).max
Request = tuple[int, list[int]]
"""One layer of one pass: the layer, and its experts."""


class Recorder(Predictor):
    """Predicts nothing, and records the experts that each layer of each pass requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        """Record the choice. It is called after each layer's choice, once per layer ahead."""
        if ahead == 1:
            self.requests.append((state.layer, np.unique(state.chosen[state.layer]).tolist()))
        return None


def decoded(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Iterator[int]:
    """Decode greedily, one stream per slot. Yields the number of each pass before it begins, at last `tokens`."""
    engine.begin_sequence()
    lengths = [len(prompt) for prompt in prompts]
    slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    positions = [at for length in lengths for at in range(length)]
    hidden = engine.step([token for prompt in prompts for token in prompt], slots, positions)
    last = np.cumsum(lengths) - 1
    for step in range(tokens):
        yield step
        following = engine.model.logits(hidden[last]).argmax(1).tolist()
        hidden = engine.step(following, list(range(len(prompts))), [length + step for length in lengths])
        last = np.arange(len(prompts))
    yield tokens


def recorded(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[Request]:
    """Return the requests of the passes after the prompts."""
    recorder = Recorder()
    engine.model.advisor.predictor = recorder
    for step in decoded(engine, prompts, tokens):
        if step == 0:
            recorder.requests.clear()
    return recorder.requests


def measured(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, skip: int) -> dict[str, float]:
    """Return the means of the passes after the first `skip`."""
    for step in decoded(engine, prompts, tokens):
        if step == skip:
            started_s, before = time.perf_counter(), engine.cache.stats.copy()
    counts, passes = engine.cache.stats.since(before), tokens - skip
    return {
        "measured_read": counts.reads / passes,
        "measured_read_mib": counts.bytes_read / passes / 2**20,
        "read_ahead": counts.prefetch_reads / passes,
        "pass_ms": (time.perf_counter() - started_s) / passes * 1e3,
        "waits_ms": counts.stall_ns / passes / 1e6,
        "storage_busy_ms": counts.busy_ns / passes / 1e6,
    }


def least_reads(requests: Sequence[Request], capacity: int) -> list[int]:
    """Return the experts that each request reads, with a cache that knows all later requests.

    capacity: experts that fit in memory, all of one size.
    """
    next_use: dict[tuple[int, int], int] = {}
    later: list[list[int]] = []
    for at in range(len(requests) - 1, -1, -1):
        layer, experts = requests[at]
        later.append([next_use.get((layer, expert), NEVER) for expert in experts])
        next_use.update(((layer, expert), at) for expert in experts)
    last_uses: dict[tuple[int, int], int] = {}
    reads = []
    for (layer, experts), uses in zip(requests, reversed(later), strict=True):
        wanted = {(layer, expert): use for expert, use in zip(experts, uses, strict=True)}
        reads.append(len(wanted.keys() - last_uses.keys()))
        last_uses.update(wanted)
        for key in sorted(last_uses, key=lambda key_of_use: last_uses[key_of_use])[capacity:]:
            del last_uses[key]
    return reads


def main() -> None:
    """Read the command line, record, replay and print."""
    parser = argparse.ArgumentParser(description="The least bytes that a pass of several streams reads.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48, help="of a stream, decoded")
    parser.add_argument("--characters", type=int, default=60, help="of a prompt")
    parser.add_argument("--skip", type=int, default=10, help="first passes that do not count")
    parser.add_argument("--shares", nargs="+", default=["50%", "25%"], help="experts in memory")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    for streams in options.streams:
        step = (len(text) - options.characters) // streams
        with load(options.bundle, expert_cache="100%", slots=streams, context=512) as engine:
            prompts = [engine.encode(text[at * step : at * step + options.characters]) for at in range(streams)]
            requests = recorded(engine, prompts, options.tokens)
            cost, layers = engine.bundle.manifest.cost, engine.model.spec.num_layers
            expert_bytes = cost.expert_padded_bytes // len(engine.bundle.manifest.experts)
        passes, first = options.tokens - options.skip, options.skip * layers
        for share in options.shares:
            reads = least_reads(requests, parse_cache(share, cost.expert_padded_bytes) // expert_bytes)
            requested = sum(len(experts) for _, experts in requests[first:]) / passes
            read = sum(reads[first:]) / passes
            row = {"streams": streams, "share": share, "requested": requested, "least_read": read}
            with load(options.bundle, expert_cache=share, slots=streams, context=512) as engine:
                row |= measured(engine, prompts, options.tokens, options.skip)
            print(json.dumps(row | {"least_read_mib": read * expert_bytes / 2**20}), flush=True)


if __name__ == "__main__":
    main()
