"""llama.cpp and its fork under one interface of three methods.

Each engine imports its package when it is created. Both packages have libraries of the same names, so a process can
hold only one of them.
"""

from __future__ import annotations

import ctypes
import os
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
