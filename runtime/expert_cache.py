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
from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded

from .eviction import ExpertRecords, PolicyScore, eviction_order
from .read_runs import ReadRuns
from .readers import BusyClock, ReaderThreads
from .residency import ABSENT, LOADING, QUEUED, RESIDENT, Residency
from .storage import ExpertStorage


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
        self._storage = storage
        order = partial(eviction_order, records, policy)
        runs = ReadRuns(sizes.tolist(), storage.successors, readers)
        ledger = Residency(sizes, capacity_bytes, records, order, pin_limit_bytes, storage.release, runs)
        self._ledger, self._state, self._leases = ledger, ledger.state, ledger.is_leased
        self.stats, self.prefetches = ledger.stats, ledger.prefetches
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for experts
        self._work = threading.Condition(self._lock)  # for readers: a layer that only hits must not wake them
        self._warmup = deque[int]()
        self._readers = ReaderThreads(readers, self._read_loop)
        self._reads, self._warming = BusyClock(), 0
        self._failures: dict[int, Exception] = {}
        self._closed, self._process = False, os.getpid()

    @property
    def capacity_bytes(self) -> int:
        """What queued, loading and resident experts may take together."""
        return self._ledger.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What they take now."""
        return self._ledger.used_bytes

    def holds(self, index: int) -> bool:
        """Whether an expert is in memory or on its way; advice that has not begun may yet be dropped."""
        return bool(self._state[index] in (LOADING, RESIDENT))

    # -- demand ------------------------------------------------------------------------------------------------

    def stream(
        self,
        layer: int,
        indices: Sequence[int],
        look_ahead: Callable[[], Sequence[int]] = lambda: (),
        together: bool = False,
    ) -> Generator[list[int], None, None]:
        """Yield each index once, when it is resident; it stays leased until the next ones are asked for.

        together: all that are resident at once come in one list, else each in its own.
        look_ahead: experts likely to be needed next, likeliest first; asked once this layer's reads are under way, and
        behind its first hits if there are any, because what it names waits for those reads.
        Raises StorageReadFailed or ChecksumMismatch from the reader, MemoryBudgetExceeded if an expert cannot fit,
        ExecutionError after `close`.
        """
        if os.getpid() != self._process:  # the reader thread, and perhaps a lock, stayed behind
            raise ExecutionError("the engine was loaded before this process was forked", "load the bundle in the child")
        with self._lock:
            self._require_open()
            hits, remaining = self._ledger.ask(layer, indices)
            # Reads start before the hits compute, so that the two overlap.
            self._ledger.issue(remaining)
            self._wake_reader()
        try:
            is_to_look = bool(hits and remaining)
            if not is_to_look:
                self._follow(look_ahead())
            while hits:
                some = list(hits) if together else hits[:1]
                yield some
                del hits[: len(some)]
                self._unlease(some)
                if is_to_look:
                    self._follow(look_ahead())
                    is_to_look = False
            while remaining:
                some = self._wait_for_some(remaining, together)
                yield some
                remaining = [index for index in remaining if index not in some]
                self._unlease(some)
        finally:
            self._unlease([*hits, *remaining])

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
                self._ledger.issue(remaining)
                self._wake_reader()
                ready = [i for i in remaining if self._leases[i] and self._state[i] == RESIDENT]
                if ready:
                    some = ready if together else ready[:1]
                    for index in some:
                        if self._ledger.is_ahead[index]:
                            self._ledger.count_use_of_advice(index)
                    self.stats.stall_ns += time.perf_counter_ns() - start_ns
                    return some
                if not any(self._leases[i] for i in remaining) and not self._is_reading():
                    raise MemoryBudgetExceeded(
                        f"an expert of {self._ledger.sizes[remaining[0]]} bytes does not fit into the expert cache of "
                        f"{self.capacity_bytes}",
                        "raise `--memory` or `--expert-cache`",
                    )
                self._changed.wait()

    def _is_reading(self) -> bool:
        """Reads that are under way, also those of a stream that was given up, make room when they end."""
        return bool(np.any((self._state == LOADING) | (self._state == QUEUED)))

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
            self._ledger.advise(indices)
            self._wake_reader()

    def _follow(self, advice: Sequence[int]) -> None:
        """Older advice stands where there is none."""
        if advice:
            self.prefetch(advice)

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
        """The next expert that is absent and fits, its read begun; what does not fit in its turn is left out."""
        while self._warmup:
            index = self._warmup.popleft()
            if self._ledger.fits_free(index):
                self._ledger.begin_warm(index)
                return index
        self._changed.notify_all()
        return None

    # -- room --------------------------------------------------------------------------------------------------

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity between passes: what no longer fits is evicted and its memory given back.

        Blocks while reads that are under way stand in the way; capacity_bytes must hold a token's experts of a layer.
        """
        ledger = self._ledger
        with self._changed:
            ledger.pin_limit_bytes += capacity_bytes - ledger.capacity_bytes
            ledger.capacity_bytes = capacity_bytes
            if ledger.used_bytes > capacity_bytes:
                self._shrink()
            if ledger.used_bytes <= capacity_bytes:
                self._storage.resize(capacity_bytes)

    def _shrink(self) -> None:
        """Evict what no longer fits. The lock is held."""
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

    def _read_loop(self) -> None:
        while True:
            with self._changed:
                run, warms = self._next_read()
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

    def _next_read(self) -> tuple[list[int], bool]:
        """Wait for the most urgent read: its experts, none once closed; whether the warm start asked for it."""
        while not self._closed:
            if run := self._ledger.next_read():
                return run, False
            index = self._next_to_warm()
            if index is not None:
                return [index], True
            self._work.wait()
        return [], False

    def _load(self, run: Sequence[int]) -> dict[int, Exception]:
        """Read experts; which failed, and why. Where one of several fails each is read again, alone."""
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
        """A failure is kept for the stream that waits for the expert, if one does."""
        if failure is not None:
            self._give_up(index)
            self._ledger.withdraw(index)
            if self._leases[index]:
                self._failures[index] = failure
        elif warms:
            self._ledger.arrive_warm(index)
            self.stats.warm_reads += 1
        else:
            self._ledger.arrive(index)

    def check_invariants(self) -> None:
        """Raise RuntimeError if the ledger and the states disagree (for tests)."""
        with self._lock:
            held = int(np.array(self._ledger.sizes)[self._state != ABSENT].sum())
            if held != self.used_bytes or held > self.capacity_bytes:
                raise RuntimeError(f"ledger {self.used_bytes}, held {held}, capacity {self.capacity_bytes}")

    def has(self, index: int) -> bool:
        """Whether an expert is in memory now."""
        return bool(self._state[index] == RESIDENT)

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
