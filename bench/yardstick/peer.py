"""Time llama.cpp on given token ids: ``python -m yardstick.peer MODEL.gguf IDS.json --prompt-tokens N``.

The prompt is one batch, every further id one decode, as `moec bench --text` does it. Prints one JSON object. Needs the
extra `bench`, and nothing else of this project, so that it can run in an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import llama_cpp

MMAP, NO_MMAP = 1, 0  # enum llama_load_mode
BATCH_TOKENS = 512


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """Drop llama.cpp's own log."""


def load(path: Path, threads: int, context_tokens: int, is_mapped: bool) -> tuple[Any, Any]:
    """A model and a context. Mapped: pages come on demand; else rows are repacked in memory, its fastest way."""
    model_options = llama_cpp.llama_model_default_params()
    model_options.load_mode = MMAP if is_mapped else NO_MMAP
    model_options.use_extra_bufts = not is_mapped
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load `{path}`")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = context_tokens, BATCH_TOKENS, BATCH_TOKENS
    options.n_threads = options.n_threads_batch = threads
    return model, llama_cpp.llama_init_from_model(model, options)


def decode(context: Any, ids: list[int]) -> int:
    """Run ids behind those before, logits of the last; nanoseconds."""
    array = (ctypes.c_int32 * len(ids))(*ids)
    started_ns = time.perf_counter_ns()
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))) != 0:
        raise SystemExit("llama.cpp: the decode failed")
    llama_cpp.llama_synchronize(context)
    return time.perf_counter_ns() - started_ns


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time llama.cpp on given token ids.")
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
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    started_ns = time.perf_counter_ns()
    model, context = load(options.model, options.threads, options.context, options.mmap)
    load_ns = time.perf_counter_ns() - started_ns
    prompt = ids[: options.prompt_tokens]
    if not options.mmap or options.warm:  # the first pass also touches scratch; a mapped file is cold unless asked for
        decode(context, prompt[:BATCH_TOKENS])
        for token in ids[options.prompt_tokens :] if options.warm else ():
            decode(context, [token])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    prefill_ns = sum(
        decode(context, prompt[first : first + BATCH_TOKENS]) for first in range(0, len(prompt), BATCH_TOKENS)
    )
    prefilled = resource.getrusage(resource.RUSAGE_SELF)
    steps = [decode(context, [token]) for token in ids[options.prompt_tokens :]]
    after = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "engine": f"llama-cpp-python {llama_cpp.__version__}",
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
    print(json.dumps(told))
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
