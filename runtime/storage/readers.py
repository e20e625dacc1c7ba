"""Threads that read experts, and a clock of the time in which at least one of them reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class ReaderThreads:
    """Threads of one loop, started at the first read."""

    def __init__(self, count: int, loop: Callable[[], None]) -> None:
        self._count, self._loop = count, loop
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads that are not running."""
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._loop, name=f"moec-reader-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

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


def _ended() -> None:
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
