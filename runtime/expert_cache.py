"""ExpertCache: which routed experts are in memory, inside a capacity in bytes.

`stream(keys)` yields experts ready to compute, hits first, misses as they arrive; an expert is leased while the
caller holds it and is never evicted then. `prefetch(keys)` is advice: it may read, it never changes a result.
`warm(keys)` fills free capacity behind everything else. A few reader threads serve all three in this order; advice that
has gone stale is dropped unread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded

from .cache_statistics import CacheStats
from .eviction import ExpertRecords, PolicyScore, eviction_order
from .readers import BusyClock, ReaderThreads
from .storage import ExpertStorage

ABSENT, QUEUED, LOADING, RESIDENT = range(4)


class ExpertCache:
    """Residency of all routed experts of one bundle.

    sizes: padded bytes per expert, int64 [N]. capacity_bytes must hold the experts that one token needs in a layer.
    readers: threads that read. Invariant: bytes of queued, loading and resident experts never exceed the capacity.
    """

    def __init__(
        self,
        storage: ExpertStorage,
        sizes: np.ndarray,
        capacity_bytes: int,
        records: ExpertRecords,
        policy: PolicyScore,
        pin_limit_bytes: int,
        readers: int = 1,
    ) -> None:
        self._storage, self._sizes, self.capacity_bytes = storage, sizes, capacity_bytes
        self._records, self._policy, self._pin_limit_bytes = records, policy, pin_limit_bytes
        count = len(sizes)
        self._state = np.zeros(count, np.int8)
        self._leases = np.zeros(count, np.int32)
        self._prefetched = np.zeros(count, bool)
        self._seen = np.zeros(count, bool)
        self.prefetches = np.zeros((2, count), np.int64)  # per expert: read ahead; of these, asked for in time
        self._pins: list[int] = []
        self.used_bytes = 0
        self._clock = self._running_layer = 0
        self.stats = CacheStats()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for experts
        self._work = threading.Condition(self._lock)  # for readers: a layer that only hits must not wake them
        self._demand, self._advice, self._warmup = deque[int](), deque[int](), deque[int]()
        self._readers = ReaderThreads(readers, self._read_loop)
        self._reads, self._warming = BusyClock(), 0
        self._failures: dict[int, Exception] = {}
        self._closed, self._process = False, os.getpid()

    # -- demand ------------------------------------------------------------------------------------------------

    def stream(
        self, layer: int, indices: Sequence[int], advice: Sequence[int] = (), together: bool = False
    ) -> Generator[list[int], None, None]:
        """Yield each index once, when it is resident; it stays leased until the next ones are asked for.

        together: all that are resident at once come in one list, else each in its own.
        advice: experts likely to be needed next, likeliest first; read behind the misses of this layer.
        Raises StorageReadFailed or ChecksumMismatch from the reader, MemoryBudgetExceeded if an expert cannot fit,
        ExecutionError after `close`.
        """
        if os.getpid() != self._process:  # the reader thread, and perhaps a lock, stayed behind
            raise ExecutionError("the engine was loaded before this process was forked", "load the bundle in the child")
        with self._lock:
            self._require_open()
            self._running_layer = layer
            hits, remaining = self._classify(indices)
            # Reads start before the hits compute, so that the two overlap.
            self._issue(remaining)
            if advice:
                self._prefetch_locked(advice)
        try:
            while hits:
                some = list(hits) if together else hits[:1]
                yield some
                del hits[: len(some)]
                self._unlease(some)
            while remaining:
                some = self._wait_for_some(remaining, together)
                yield some
                remaining = [index for index in remaining if index not in some]
                self._unlease(some)
        finally:
            self._unlease([*hits, *remaining])

    def _classify(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        hits: list[int] = []
        misses: list[int] = []
        self._clock += 1
        self._records.use(indices, self._clock)
        for index in indices:
            if self._state[index] == RESIDENT:
                if self._prefetched[index]:
                    self.stats.prefetch_hits += 1
                    self._count_prefetch_use(index)
                self._leases[index] = 1
                hits.append(index)
            else:
                misses.append(index)
        self.stats.lookups += len(indices)
        self.stats.hits += len(hits)
        self.stats.misses += len(misses)
        return hits, misses

    def _issue(self, waiting: Sequence[int]) -> None:
        """Start the reads of as many waiting experts as fit now, and lease them."""
        victims = self._victims(spares_pins=False)
        for index in waiting:
            if self._leases[index]:
                continue
            state = self._state[index]
            if state == ABSENT:
                if not self._make_room(int(self._sizes[index]), victims, is_demand=True):
                    break
                self._reserve(index)
                self._demand.append(index)
            elif state == QUEUED:
                # Advised but not begun: now a read on demand. An abandoned stream may have left it in demand already.
                if index in self._advice:
                    self._advice.remove(index)
                    self._prefetched[index] = False
                    self._demand.append(index)
            elif state == LOADING and self._prefetched[index]:
                self.stats.late_hits += 1
            self._leases[index] = 1
        self._wake_reader()

    def _wait_for_some(self, remaining: list[int], together: bool) -> list[int]:
        """Block until one of the remaining experts is resident, and return it, or with `together` all that are.

        Reads that had no room are started as room appears.
        """
        start_ns = time.perf_counter_ns()
        with self._changed:
            while True:
                self._require_open()
                failed = next((i for i in remaining if i in self._failures), None)
                if failed is not None:
                    raise self._failures.pop(failed)
                self._issue(remaining)
                ready = [i for i in remaining if self._leases[i] and self._state[i] == RESIDENT]
                if ready:
                    some = ready if together else ready[:1]
                    for index in some:
                        if self._prefetched[index]:
                            self._count_prefetch_use(index)
                    self.stats.stall_ns += time.perf_counter_ns() - start_ns
                    return some
                # Reads that are under way, also those of a stream that was given up, make room when they end.
                reading = np.any((self._state == LOADING) | (self._state == QUEUED))
                if not any(self._leases[i] for i in remaining) and not reading:
                    raise MemoryBudgetExceeded(
                        f"an expert of {int(self._sizes[remaining[0]])} bytes does not fit into the expert cache of "
                        f"{self.capacity_bytes}",
                        "raise `--memory` or `--expert-cache`",
                    )
                self._changed.wait()

    def _count_prefetch_use(self, index: int) -> None:
        self._prefetched[index] = False
        self.stats.prefetch_used += 1
        self.prefetches[1, index] += 1

    def _unlease(self, indices: Sequence[int]) -> None:
        with self._changed:
            for index in indices:
                self._leases[index] = 0
                self._failures.pop(index, None)
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise ExecutionError("the expert cache is closed", "load the bundle again")

    # -- advice ------------------------------------------------------------------------------------------------

    def prefetch(self, indices: Sequence[int]) -> None:
        """Read these experts ahead, likeliest first, as far as room and the pin limit go. Replaces older advice."""
        with self._lock:
            self._prefetch_locked(indices)

    def _prefetch_locked(self, indices: Sequence[int]) -> None:
        while self._advice:
            self._withdraw(self._advice.popleft())
        self._pins = []
        pinned = 0
        for index in indices:
            pinned += int(self._sizes[index])
            if pinned > self._pin_limit_bytes:
                break
            self._pins.append(index)
        victims = self._victims(spares_pins=True)
        for index in self._pins:
            if self._state[index] != ABSENT:
                continue
            if not self._make_room(int(self._sizes[index]), victims, is_demand=False):
                break
            self._reserve(index)
            self._prefetched[index] = True
            self._advice.append(index)
        if self._advice:
            self._wake_reader()

    def _withdraw(self, index: int) -> None:
        """Forget a read that has not begun, or that failed."""
        self._state[index] = ABSENT
        self._prefetched[index] = False
        self.used_bytes -= int(self._sizes[index])

    # -- warm start --------------------------------------------------------------------------------------------

    def warm(self, indices: Sequence[int]) -> None:
        """Fill free capacity, first index first, while nothing more urgent is to be read; evicts nothing.

        An expert that cannot be read is left out: who asks for it is told why.
        """
        with self._lock:
            self._warmup = deque(indices)
            self._wake_reader()

    def finish_warming(self) -> None:
        """Block until the warm start has filled what it can."""
        with self._changed:
            while not self._closed and (self._warmup or self._warming):
                self._changed.wait()

    def _next_to_warm(self) -> int | None:
        """The next expert that is absent and fits, reserved; what does not fit when its turn comes is left out."""
        while self._warmup:
            index = self._warmup.popleft()
            if self._state[index] == ABSENT and self.used_bytes + self._sizes[index] <= self.capacity_bytes:
                self._reserve(index)
                return index
        self._changed.notify_all()
        return None

    # -- room --------------------------------------------------------------------------------------------------

    def _reserve(self, index: int) -> None:
        self._state[index] = QUEUED
        self.used_bytes += int(self._sizes[index])

    def _victims(self, spares_pins: bool) -> Iterator[int]:
        """What may be evicted, first to go first; demand takes pins as well, worst prediction first.

        The order is made when it is first needed, and serves all reads that are started together.
        """
        candidates = np.flatnonzero((self._state == RESIDENT) & (self._leases == 0))
        order = eviction_order(self._records, self._policy, self._running_layer, candidates).tolist()
        rank = {index: position for position, index in enumerate(self._pins)}
        free = [index for index in order if index not in rank]
        pinned = [] if spares_pins else sorted((i for i in order if i in rank), key=lambda i: -rank[i])
        for index in (*free, *pinned):
            if self._state[index] == RESIDENT and not self._leases[index]:  # leased meanwhile
                yield index

    def _make_room(self, need_bytes: int, victims: Iterator[int], is_demand: bool) -> bool:
        """Evict until need_bytes are free; demand withdraws advice first, likeliest last.

        Returns False if that cannot work before leases or reads end.
        """
        missing = self.used_bytes + need_bytes - self.capacity_bytes
        while is_demand and self._advice and missing > 0:
            index = self._advice.pop()
            self._withdraw(index)
            missing -= int(self._sizes[index])
        taken: list[int] = []
        while missing > 0:
            victim = next(victims, None)
            if victim is None:
                return False
            taken.append(victim)
            missing -= int(self._sizes[victim])
        for victim in taken:
            self._evict(victim)
        return True

    def _evict(self, index: int) -> None:
        self._storage.release(index)
        self._withdraw(index)
        self.stats.evictions += 1

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity between passes: what no longer fits is evicted and its memory given back.

        Blocks while reads that are under way stand in the way; capacity_bytes must hold a token's experts of a layer.
        """
        with self._changed:
            self._pin_limit_bytes += capacity_bytes - self.capacity_bytes
            self.capacity_bytes = capacity_bytes
            if self.used_bytes <= capacity_bytes:
                return
            while self._advice:
                self._withdraw(self._advice.popleft())
            victims = self._victims(spares_pins=False)
            while self.used_bytes > self.capacity_bytes and not self._closed:
                victim = next(victims, None)
                if victim is not None:
                    self._evict(victim)
                elif self._reads.running or self._demand:
                    self._changed.wait()
                    victims = self._victims(spares_pins=False)
                else:
                    break
            self._storage.trim()

    # -- reader ------------------------------------------------------------------------------------------------

    def _wake_reader(self) -> None:
        if not (self._demand or self._advice or self._warmup):
            return
        self._readers.start()
        self._work.notify_all()

    def _read_loop(self) -> None:
        while True:
            with self._changed:
                index, ahead, warms = self._next_read()
                if index is None:
                    return
                self._state[index] = LOADING
                self._warming += warms
                self.stats.busy_ns += self._reads.change(1)
            self._read(index, ahead, warms)

    def _next_read(self) -> tuple[int | None, bool, bool]:
        """Wait for the most urgent read: its index, None once closed; whether advice or the warm start asked for it."""
        while not self._closed:
            if self._demand:
                return self._demand.popleft(), False, False
            if self._advice:
                return self._advice.popleft(), True, False
            index = self._next_to_warm()
            if index is not None:
                return index, False, True
            self._work.wait()
        return None, False, False

    def _read(self, index: int, ahead: bool, warms: bool) -> None:
        """Read one expert; a failure is kept for the stream that waits for it, if one does."""
        failure: Exception | None = None
        try:
            self._storage.load(index)
        except Exception as error:
            failure = error
        with self._changed:
            self.stats.busy_ns += self._reads.change(-1)
            self._warming -= warms
            if failure is not None:
                with contextlib.suppress(OSError):  # the readers must go on
                    self._storage.release(index)
                self._withdraw(index)
                if self._leases[index]:
                    self._failures[index] = failure
            else:
                self._state[index] = RESIDENT
                self.stats.warm_reads += warms
                if not warms:
                    self.stats.add_read(int(self._sizes[index]), bool(self._seen[index]), ahead)
                    self.prefetches[0, index] += ahead
                self._seen[index] = True
            self._changed.notify_all()

    def check_invariants(self) -> None:
        """Raise RuntimeError if the ledger and the states disagree (for tests)."""
        with self._lock:
            held = int(self._sizes[self._state != ABSENT].sum())
            if held != self.used_bytes or held > self.capacity_bytes:
                raise RuntimeError(f"ledger {self.used_bytes}, held {held}, capacity {self.capacity_bytes}")

    def resident(self) -> np.ndarray:
        """Indices now in memory."""
        with self._lock:
            return np.flatnonzero(self._state == RESIDENT)

    def close(self) -> None:
        """Stop the readers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._work.notify_all()
        self._readers.join()
