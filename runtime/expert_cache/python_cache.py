"""PythonCache: the expert cache in Python, for runs with an accelerator or the numpy kernels.

It is the specification of NativeCache.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from ..options.readers import ONE_READER, Readers, Takes
from ..storage.interface import ExpertStorage
from ..storage.read_runs import ReadRuns
from ..storage.readers import BusyClock, ReaderThreads
from .cache_spec import ABSENT, LOADING, QUEUED, RESIDENT, CacheSpec
from .cache_stats import CacheStats
from .eviction import eviction_order
from .interface import StreamingCache
from .policies import PolicyScore
from .residency import Residency


class PythonCache(StreamingCache):
    """Residency of all routed experts of one bundle, with reader threads in Python.

    storage: storage that holds the experts.
    spec: sizes, records and limits. Each use is added to the records.
    policy: score by which experts are kept.
    readers: number and duties of reader threads.
    Invariant: bytes of queued, loading and resident experts never exceed the capacity.
    """

    def __init__(
        self,
        storage: ExpertStorage,
        spec: CacheSpec,
        policy: PolicyScore,
        readers: Readers = ONE_READER,
    ) -> None:
        self._storage = storage
        order = partial(eviction_order, spec.records, policy)
        runs = ReadRuns(spec.sizes.tolist(), storage.next_in_file, readers.count)
        ledger = Residency(spec, order, storage.release, runs, readers.most_queued)
        self._records = spec.records
        super().__init__(spec.sizes, ledger.state)
        self._ledger, self._leases, self.prefetches = ledger, ledger.is_leased, ledger.prefetches
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for layers that wait for experts
        self._work = threading.Condition(self._lock)  # for readers: a layer that only hits must not wake them
        self._warmup = deque[int]()
        self._readers = ReaderThreads(readers, self._read_loop)
        self._reads, self._warming = BusyClock(), 0
        self._failures: dict[int, Exception] = {}
        self._closed = False

    @property
    def stats(self) -> CacheStats:
        return self._ledger.stats

    @property
    def capacity_bytes(self) -> int:
        return self._ledger.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    # -- demand ------------------------------------------------------------------------------------------------

    def _request_and_queue(self, layer: int, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        with self._lock:
            self._require_open()
            hits, misses = self._ledger.request(layer, indices)
            self._ledger.queue_and_lease(misses)
            self._wake_reader()
        return hits, misses

    def wait_for_some(self, remaining: list[int], all_at_once: bool) -> list[int]:
        start_ns = time.perf_counter_ns()
        with self._changed:
            while True:
                self._require_open()
                failed = next((i for i in remaining if i in self._failures), None)
                if failed is not None:
                    raise self._failures.pop(failed)
                self._ledger.queue_and_lease(remaining)
                self._wake_reader()
                ready = [i for i in remaining if self._leases[i] and self._state[i] == RESIDENT]
                if ready:
                    some = ready if all_at_once else ready[:1]
                    for index in some:
                        if self._ledger.is_ahead[index]:
                            self._ledger.count_use_of_advice(index)
                    self.stats.stall_ns += time.perf_counter_ns() - start_ns
                    return some
                if not any(self._leases[i] for i in remaining) and not self._is_reading():
                    raise self._too_large_error(remaining[0])
                self._changed.wait()

    def _is_reading(self) -> bool:
        """Return whether a read is queued or under way, that of an abandoned stream included.

        Its end can make memory free.
        """
        return bool(np.any((self._state == LOADING) | (self._state == QUEUED)))

    def unlease(self, indices: Sequence[int]) -> None:
        with self._changed:
            for index in indices:
                self._leases[index] = 0
                self._failures.pop(index, None)
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    # -- advice ------------------------------------------------------------------------------------------------

    def prefetch(self, indices: Sequence[int]) -> None:
        with self._lock:
            self._ledger.advise(indices)
            self._wake_reader()

    # -- warm start --------------------------------------------------------------------------------------------

    def begin_sequence(self) -> None:
        with self._lock:
            self._records.begin_sequence()

    def warm(self, indices: Sequence[int]) -> None:
        with self._lock:
            self._warmup = deque(indices)
            self._wake_reader()

    def finish_warming(self) -> None:
        with self._changed:
            while not self._closed and (self._warmup or self._warming):
                self._changed.wait()

    def _next_to_warm(self) -> int | None:
        """Begin the read of the next expert that is absent and fits. Experts before it that do not fit are left out."""
        while self._warmup:
            index = self._warmup.popleft()
            if self._ledger.fits_free(index):
                self._ledger.begin_warm(index)
                return index
        self._changed.notify_all()
        return None

    # -- capacity ----------------------------------------------------------------------------------------------

    def resize(self, capacity_bytes: int) -> None:
        self._require_process()
        ledger = self._ledger
        with self._changed:
            ledger.pin_limit_bytes += capacity_bytes - ledger.capacity_bytes
            ledger.capacity_bytes = capacity_bytes
            if ledger.used_bytes > capacity_bytes:
                self._shrink()
            if ledger.used_bytes <= capacity_bytes:
                self._storage.resize(capacity_bytes)

    def _shrink(self) -> None:
        """Evict the experts that no longer fit. The caller holds the lock."""
        ledger = self._ledger
        ledger.drop_advice()
        victims = ledger.victims(spares_pins=False)
        while ledger.used_bytes > ledger.capacity_bytes and not self._closed:
            victim = next(victims, None)
            if victim is not None:
                ledger.evict(victim)
            elif self._reads.running or ledger.demand:
                self._changed.wait()
                victims = ledger.victims(spares_pins=False)
            else:
                break

    # -- reader ------------------------------------------------------------------------------------------------

    def _wake_reader(self) -> None:
        if not (self._ledger.demand or self._ledger.advice or self._warmup):
            return
        self._readers.start()
        self._work.notify_all()

    def _read_loop(self, takes: Takes) -> None:
        while True:
            with self._changed:
                run, warms = self._next_read(takes)
                if not run:
                    return
                self._warming += warms
                self.stats.busy_ns += self._reads.change(1)
            failures = self._load(run)
            with self._changed:
                self.stats.busy_ns += self._reads.change(-1)
                self._warming -= warms
                for index in run:
                    self._end_read(index, warms, failures.get(index))
                self._changed.notify_all()

    def _next_read(self, takes: Takes) -> tuple[list[int], bool]:
        """Wait for the most urgent read. Returns its experts, none after `close`, and whether it is a warm one."""
        while not self._closed:
            if run := self._ledger.next_read(takes):
                return run, False
            index = None if takes == "advice" else self._next_to_warm()
            if index is not None:
                return [index], True
            self._work.wait()
        return [], False

    def _load(self, run: Sequence[int]) -> dict[int, Exception]:
        """Read experts. Returns the errors of those that failed. If a run fails, its experts are read one by one."""
        try:
            self._storage.load(*run)
        except Exception as error:
            if len(run) == 1:
                return {run[0]: error}
            failures: dict[int, Exception] = {}
            for index in run:
                self._give_up(index)
                failures |= self._load([index])
            return failures
        return {}

    def _give_up(self, index: int) -> None:
        with contextlib.suppress(OSError):  # the readers must go on
            self._storage.release(index)

    def _end_read(self, index: int, warms: bool, failure: Exception | None) -> None:
        """End the read of one expert. A failure is kept for the stream that waits for the expert, if there is one."""
        if failure is not None:
            self._give_up(index)
            self._ledger.fail_read(index)
            if self._leases[index]:
                self._failures[index] = failure
        elif warms:
            self._ledger.arrive_warm(index)
            self.stats.warm_reads += 1
        else:
            self._ledger.arrive(index)

    def check_invariants(self) -> None:
        with self._lock:
            self._check(self.used_bytes, int(self._sizes[self._state != ABSENT].sum()))

    def resident(self) -> np.ndarray:
        with self._lock:
            return np.flatnonzero(self._state == RESIDENT)

    def leased(self) -> np.ndarray:
        with self._lock:
            return np.flatnonzero(self._leases)

    def close(self) -> None:
        if self._is_forked:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._work.notify_all()
        self._readers.join()
