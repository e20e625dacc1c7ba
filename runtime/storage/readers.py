"""Threads that read experts, and a clock of the time in which at least one of them reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..options.readers import Readers, Takes

LOW_PRIORITY = 10
"""Nice value of a reader of advice. It yields to threads that compute and to readers of demand."""


class ReaderThreads:
    """Threads of one loop, started at the first read. The loop is called with the queues that the reader takes from."""

    def __init__(self, readers: Readers, loop: Callable[[Takes], None]) -> None:
        self._readers, self._loop = readers, loop
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads that are not running."""
        takes = self._readers.takes
        while len(self._threads) < len(takes):
            at = len(self._threads)
            thread = threading.Thread(target=self._run, args=(takes[at],), name=f"moec-reader-{at}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, takes: Takes) -> None:
        if takes == "advice":
            self._step_back()
        self._loop(takes)

    def _step_back(self) -> None:
        """Give the calling thread low priority, and its processors if any are named. A refusal is ignored."""
        if not hasattr(os, "sched_setaffinity"):
            return
        thread_id = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, max(LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, thread_id)))
        with suppress(OSError):
            if self._readers.cpus:
                os.sched_setaffinity(thread_id, self._readers.cpus)

    def running(self) -> int:
        """Return how many have started and have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait until all threads have ended, for good.

        The loop is dropped, so that it does not keep its owner alive.
        """
        for thread in self._threads:
            thread.join()
        self._loop = _ended


def _ended(takes: Takes) -> None:
    """The loop after `join`."""


class BusyClock:
    """Number of reads in progress, and the time with at least one. Callers hold a lock."""

    def __init__(self) -> None:
        self.running = 0
        self._last_change_ns = 0

    def change(self, by: int) -> int:
        """Change the number of reads in progress. Returns the nanoseconds of reading since the last change."""
        now_ns = time.perf_counter_ns()
        passed_ns = now_ns - self._last_change_ns if self.running else 0
        self._last_change_ns, self.running = now_ns, self.running + by
        return passed_ns
