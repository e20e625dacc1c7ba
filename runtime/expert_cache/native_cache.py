"""NativeCache: the expert cache whose decisions, reads and waits are in the C++ extension.

It decides as PythonCache does, call by call. No Python runs between two reads, so storage does not wait for the
interpreter. Python reads an expert if there is no free place of its size, or if its read failed.
Python compares an expert with its checksum if it is new or its file has changed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from moec.manifests.errors import ExecutionError

from .. import kernels
from ..options.readers import Takes
from ..options.runtime import RuntimeOptions, parse_weights
from ..storage.interface import NativeStorage
from ..storage.read_runs import MAX_RUN_BYTES
from ..storage.readers import ReaderThreads
from .bound_experts import BoundExperts
from .cache_spec import RESIDENT, CacheSpec
from .cache_stats import CacheStats
from .interface import StreamingCache
from .policies import DEFAULT_WEIGHTS
from .records import ExpertRecords


class NativeCache(StreamingCache):
    """The expert cache in C++. `open_cache.py` says which runs can have it.

    experts: kernels over the bytes of each expert.
    options: policy and readers.
    The other parameters are those of PythonCache.

    reads: ExpertCache of the extension, which decides, reads and waits.
    """

    def __init__(
        self,
        storage: NativeStorage,
        experts: BoundExperts,
        spec: CacheSpec,
        options: RuntimeOptions,
    ) -> None:
        records, count, readers = spec.records, len(spec.sizes), options.reader_threads
        super().__init__(spec.sizes, np.empty(count, np.int8))
        self._leases, self.prefetches = np.zeros(count, bool), np.zeros((2, count), np.int64)
        self._counts = np.zeros(len(CacheStats.__slots__), np.int64)
        columns = {
            "state": self._state,
            "is_leased": self._leases,
            "is_ahead": np.zeros(count, bool),
            "is_seen": np.zeros(count, bool),
        }
        shared = {"heat": records.heat, "last_used": records.last_used, "uses": records.uses}
        extension = kernels.compiled()
        if extension is None:
            raise ValueError("a native cache needs native kernels")
        self.reads = extension.ExpertCache(
            {name: column.view(np.uint8) for name, column in columns.items()}
            | shared
            | {"prefetches": self.prefetches, "counts": self._counts},
            spec.sizes.tolist(),
            records.layer.tolist(),
            storage.next_in_file,
            readers.count,
            MAX_RUN_BYTES,
            records.half_life,
            eviction_of(extension, options, records),
            spec.capacity_bytes,
            spec.pin_limit_bytes,
            [(*storage.source(index), *experts.native(index)) for index in range(count)],
            storage.mode == "buffered",
            storage.mapped(),
            readers.most_queued,
        )
        self._storage = storage
        self._readers = ReaderThreads(readers, self._serve)
        self._stop: Callable[[], object] | None = None  # None until the readers run
        self._is_closed = self._has_no_memory = False
        self._failures: dict[int, Exception] = {}  # last error of each expert

    @property
    def stats(self) -> CacheStats:
        return CacheStats(*self._counts.tolist())

    @property
    def capacity_bytes(self) -> int:
        return int(self.reads.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return int(self.reads.used_bytes)

    def resident(self) -> np.ndarray:
        return np.flatnonzero(self._state == RESIDENT)

    def leased(self) -> np.ndarray:
        return np.flatnonzero(self._leases)

    def _request_and_queue(self, layer: int, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        self._require_kernels()
        hits_and_misses = self.reads.request_and_queue(layer, indices)
        if hits_and_misses is None:
            raise self._closed_error()
        hits, misses = hits_and_misses
        try:
            self._start_readers()
        except BaseException:
            self.unlease([*hits, *misses])
            raise
        return hits, misses

    def _require_kernels(self) -> None:
        if kernels.compiled() is None:  # the reference does not bind experts again at new places
            raise ExecutionError("the kernels were changed after the engine was loaded", "load the bundle again")

    def wait_for_some(self, remaining: list[int], all_at_once: bool) -> list[int]:
        while True:
            self._start_readers()
            state, experts = self.reads.wait(remaining, all_at_once)
            if state == "ready":
                return list(experts)
            if state != "again":
                raise self._error(state, experts[0] if state == "failed" else remaining[0])

    def _error(self, state: str, index: int) -> Exception:
        """Return the error for a requested expert that could not be read."""
        if state == "closed":
            return self._closed_error()
        return self._too_large_error(index) if state == "too large" else self._failures[index]

    def unlease(self, indices: Sequence[int]) -> None:
        self.reads.unlease(indices)

    def bind_layers(
        self,
        layers: list[dict[str, Any]],
        size: int,
        ahead_eps: float,
        rules: dict[str, float],
        paths: dict[str, Any] | None = None,
        lossy: dict[str, Any] | None = None,
    ) -> Any:
        """Return the extension's `ExpertLayers` over this cache, made from these arguments."""
        extension = kernels.compiled()
        if extension is None:
            raise ValueError("layers need native kernels")
        return extension.ExpertLayers(self.reads, layers, size, ahead_eps, rules, paths, lossy)

    def begin_pass(self) -> None:
        """Prepare for a pass through bound layers. Raises ExecutionError like `stream`."""
        self._require_process()
        self._require_kernels()
        if self._is_closed:
            raise self._closed_error()
        self._start_readers(are_needed=True)

    def check_end(self, state: str, index: int) -> None:
        """Raise the error that `stream` would raise, if a bound layer ended without its experts."""
        if state != "done":
            raise self._error(state, index)

    def prefetch(self, indices: Sequence[int]) -> None:
        self.reads.prefetch(indices)
        self._start_readers()

    def begin_sequence(self) -> None:
        self.reads.begin_sequence()

    def warm(self, indices: Sequence[int]) -> None:
        self.reads.warm(indices)
        self._start_readers()

    def finish_warming(self) -> None:
        while not self.reads.wait_warmed():
            pass  # Python handles signals here

    def resize(self, capacity_bytes: int) -> None:
        self._require_process()
        pin_limit_bytes = self.reads.pin_limit_bytes + capacity_bytes - self.capacity_bytes
        while not self.reads.resize(capacity_bytes, pin_limit_bytes):
            pass
        if self.used_bytes <= capacity_bytes:
            _finish(partial(self._resize_storage, capacity_bytes))

    def _resize_storage(self, capacity_bytes: int) -> None:
        self._storage.take_hand_overs(self.reads.take_places)
        self._storage.resize(capacity_bytes)

    def check_invariants(self) -> None:
        self._check(*self.reads.audit())

    def close(self) -> None:
        if self._is_forked:
            return
        self._is_closed = True
        if self._stop is None:
            _stop_readers(self.reads, self._readers, self._process)
        else:
            self._stop()

    # -- readers -----------------------------------------------------------------------------------------------

    def _start_readers(self, are_needed: bool = False) -> None:
        if self._stop is None and (are_needed or self.reads.has_work()):
            # Stop them before the interpreter ends: a thread in the extension cannot end with it.
            stop = weakref.finalize(self, _stop_readers, self.reads, self._readers, self._process)
            self._readers.start()
            self._stop = stop

    def _serve(self, takes: Takes) -> None:
        try:
            self.reads.serve(self._load, self._check_new if self._storage.verifies else None, takes)
        except MemoryError:  # the failed read is not known, so no layer may wait for it
            self._has_no_memory = True
            self.reads.close()

    def _closed_error(self) -> ExecutionError:
        if self._has_no_memory:
            return ExecutionError("no memory was left while experts were read", "load the bundle again with less of it")
        return super()._closed_error()

    def _check_new(self, run: Sequence[int], addresses: Sequence[int]) -> list[int]:
        """Compare experts that were read with their checksums. Returns those that differ."""
        failed = []
        for index, address in zip(run, addresses, strict=True):
            try:
                self._storage.check(index, address)
            except Exception as error:
                self._failures[index] = error
                failed.append(index)
        return failed

    def _load(self, run: Sequence[int]) -> list[int]:
        """Read experts into new places. Returns those that failed. If a run fails, its experts are read one by one."""
        try:
            self._storage.take_hand_overs(self.reads.take_places)
            self._storage.load(*run)
            for index in run:
                self.reads.place(index, self._storage.address(index))
        except Exception as error:
            if len(run) > 1:
                return [failed for index in run for failed in self._load([index])]
            self._failures[run[0]] = error
            self._storage.release(run[0])
            self.reads.place(run[0], 0)
            return list(run)
        return []


def eviction_of(extension: Any, options: RuntimeOptions, records: ExpertRecords) -> Any:
    """Return what the policy goes by, as the extension's `Eviction`."""
    weights = DEFAULT_WEIGHTS if options.policy_weights is None else parse_weights(options.policy_weights)
    high = np.arange(len(records.layer)) if records.expert is None else records.expert
    facts = (records.frequency.tolist(), high.tolist(), records.num_layers, records.encoder_layers)
    return extension.Eviction(options.policy, astuple(weights), *facts)


def _stop_readers(reads: Any, readers: ReaderThreads, process: int) -> None:
    if os.getpid() == process:
        reads.close()
        readers.join()


def _finish(work: Callable[[], None]) -> None:
    """Run `work` to its end, even if a signal handler raises in the main thread meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    failures: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="moec-resize")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
