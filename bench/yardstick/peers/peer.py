"""Time llama.cpp or its fork on given token ids.

    python -m bench.yardstick.peers.peer MODEL.gguf IDS.json --prompt-tokens N

The prompt is one batch and every further id one decode, as in `moec bench --text`. Prints one JSON object. Needs the
extra `bench` and no other part of this project, so it can run in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from .peer_engines import BATCH_TOKENS, ENGINES, PeerEngine


def decode_ns(engine: PeerEngine, ids: Sequence[int]) -> int:
    """Return the time of a decode of ids, ns."""
    started_ns = time.perf_counter_ns()
    engine.decode(ids)
    return time.perf_counter_ns() - started_ns


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Time llama.cpp or its fork on given token ids.")
    parser.add_argument("--engine", choices=ENGINES, default="llama.cpp")
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="a JSON list")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--mmap", action="store_true", help="map the file, as under a memory limit")
    parser.add_argument("--warm", action="store_true", help="measure the second time over the same ids")
    options = parser.parse_args()
    ids = json.loads(options.ids.read_text(encoding="utf-8"))[: options.prompt_tokens + options.tokens]
    started_ns = time.perf_counter_ns()
    engine = ENGINES[options.engine](options.model, options.threads, options.context, options.mmap)
    load_ns = time.perf_counter_ns() - started_ns
    prompt = ids[: options.prompt_tokens]
    # The first pass also touches scratch memory. A mapped file stays cold unless --warm is given.
    if not options.mmap or options.warm:
        engine.decode(prompt[:BATCH_TOKENS])
        for token in ids[options.prompt_tokens :] if options.warm else ():
            engine.decode([token])
        engine.clear()
    prefill_ns = sum(
        decode_ns(engine, prompt[first : first + BATCH_TOKENS]) for first in range(0, len(prompt), BATCH_TOKENS)
    )
    prefilled = resource.getrusage(resource.RUSAGE_SELF)
    steps = [decode_ns(engine, [token]) for token in ids[options.prompt_tokens :]]
    after = resource.getrusage(resource.RUSAGE_SELF)
    record = {
        "engine": engine.name,
        "is_mapped": options.mmap,
        "is_warm": options.warm,
        "threads": options.threads,
        "load_ns": load_ns,
        "prompt_tokens": len(prompt),
        "ttft_ns": prefill_ns,
        "tokens": len(steps),
        "tpot_p50_ns": statistics.median(steps) if steps else None,
        "tpot_mean_ns": statistics.fmean(steps) if steps else None,
        "decode_bytes_read_per_token": (after.ru_inblock - prefilled.ru_inblock) * 512 / max(len(steps), 1),
        "peak_rss_bytes": after.ru_maxrss * 1024,
    }
    print(json.dumps(record))
    engine.close()


if __name__ == "__main__":
    main()
