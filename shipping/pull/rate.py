"""A bound of the bytes per second that all connections of a pull read together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Bytes are taken at a rate. The thread that takes more waits.

    bytes_per_s: the rate; None: no bound.
    pause: waits for a number of seconds, or until the pull ends.
    clock: seconds.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_s, self._pause, self._clock = bytes_per_s, pause, clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, size_bytes: int) -> None:
        """Wait until these bytes, which were read, fit the rate."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        self._pause(wait_s)
