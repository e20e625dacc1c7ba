"""Time llama.cpp or its fork on given token ids.

    python -m bench.yardstick.peers.peer MODEL.gguf IDS.json --prompt-tokens N

The prompt is one batch and every further id one decode, as in `moec bench --text`. Prints one JSON object. Needs the
extra `bench` and no other part of this project, so it can run in an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from .fork import LIBRARY_VARIABLE, PACKAGE

BATCH_TOKENS = 512


class PeerEngine(Protocol):
    """A model and a context of one sequence, with the fastest settings for the way it is loaded."""

    name: str

    def decode(self, ids: Sequence[int]) -> None:
        """Append ids to the sequence and wait for the logits of the last one. Raises SystemExit if the engine fails."""

    def clear(self) -> None:
        """Forget all ids."""

    def close(self) -> None:
        """Free everything."""


class LlamaCpp:
    """llama.cpp through llama-cpp-python. Pages of a mapped file are read on demand. Otherwise rows are repacked."""

    def __init__(self, path: Path, threads: int, context_tokens: int, is_mapped: bool) -> None:
        import llama_cpp

        self._library, self.name = llama_cpp, f"llama-cpp-python {llama_cpp.__version__}"
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        model_options = llama_cpp.llama_model_default_params()
        model_options.load_mode = int(is_mapped)  # enum llama_load_mode
        model_options.use_extra_bufts = not is_mapped
        self._model = _loaded(llama_cpp.llama_model_load_from_file(str(path).encode(), model_options), path)
        options = llama_cpp.llama_context_default_params()
        _set_sizes(options, threads, context_tokens)
        self._context = _loaded(llama_cpp.llama_init_from_model(self._model, options), path)

    def decode(self, ids: Sequence[int]) -> None:
        tokens = _array(ids)  # a batch points into this array
        _check(self._library.llama_decode(self._context, self._library.llama_batch_get_one(tokens, len(ids))))
        self._library.llama_synchronize(self._context)

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


class IkLlamaCpp:
    """ik_llama.cpp through ik-llama-cpp-python.

    It uses the library that `fork.py` built, or else the package's library for AVX2. The defaults fuse operations and
    use flash attention. Repacking of rows is its option `-rtr`.
    """

    def __init__(self, path: Path, threads: int, context_tokens: int, is_mapped: bool) -> None:
        from importlib.metadata import version

        from ik_llama_cpp import _ctypes_api as api

        built = "built for this machine" if LIBRARY_VARIABLE in os.environ else "as packaged"
        self._library, self.name = api, f"{PACKAGE} {version(PACKAGE)}, {built}"
        self._declare(api._lib, api.llama_batch)
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *ignored: None)
        api._lib.llama_log_set(self._log, None)
        api.llama_backend_init()
        model_options = api.llama_model_default_params()
        model_options.use_mmap, model_options.repack_tensors = is_mapped, not is_mapped
        self._model = _loaded(api.llama_model_load_from_file(str(path).encode(), model_options), path)
        options = api.llama_context_default_params()
        _set_sizes(options, threads, context_tokens)
        self._context, self._position = _loaded(api.llama_init_from_model(self._model, options), path), 0

    @staticmethod
    def _declare(library: Any, batch: type[ctypes.Structure]) -> None:
        """Declare functions that the binding leaves out."""
        library.llama_batch_get_one.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
        library.llama_batch_get_one.restype = batch
        library.llama_synchronize.argtypes = (ctypes.c_void_p,)
        library.llama_log_set.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def decode(self, ids: Sequence[int]) -> None:
        library, tokens = self._library._lib, _array(ids)
        batch = library.llama_batch_get_one(tokens, len(ids), self._position, 0)
        _check(self._library.llama_decode(self._context, batch))
        library.llama_synchronize(self._context)
        self._position += len(ids)

    def clear(self) -> None:
        self._library.llama_kv_cache_clear(self._context)
        self._position = 0

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_free_model(self._model)


ENGINES: dict[str, type[LlamaCpp | IkLlamaCpp]] = {"llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp}


def _array(ids: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(ids))(*ids)


def _set_sizes(options: Any, threads: int, context_tokens: int) -> None:
    options.n_ctx, options.n_batch, options.n_ubatch = context_tokens, BATCH_TOKENS, BATCH_TOKENS
    options.n_threads = options.n_threads_batch = threads


def _loaded(handle: Any, path: Path) -> Any:
    if not handle:
        raise SystemExit(f"the peer cannot load `{path}`")
    return handle


def _check(status: int) -> None:
    if status != 0:
        raise SystemExit(f"the peer's decode failed with {status}")


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
