"""Fetch the missing ranges of a bundle with several connections, while one thread computes digests.

Bytes are hashed where they were written, so that what is on the disk is what was checked. They are in the page cache
then, and nothing is read from the disk a second time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moec.manifests.errors import ChecksumMismatch, StorageReadFailed, StoreFailed
from moec.manifests.progress import Progress

from ..channel import bundle_path
from ..store.interface import Store
from .partial_bundle import PartialBundle, write_at

CONNECTIONS = 4
MAX_RANGE_BYTES = 8 << 20
"""Longest range of one request."""
NOTED_BYTES = 1 << 20
"""Bytes of a range after which the journal notes them."""
_SLOW_BYTES_PER_S = 4 << 20
_LEAST_RANGE_BYTES = 64 << 10
_HASHED_BYTES = 1 << 20
_LOOK_EVERY_S = 0.1
_LEAVE_S = 2.0
"""Time for threads to end after a failure, seconds."""
_SYNC_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Connections and rate of a fetch.

    connections: connections at a time.
    most_bytes_per_s: rate of all of them together; None: no bound.
    """

    connections: int = CONNECTIONS
    most_bytes_per_s: int | None = None

    @property
    def used_connections(self) -> int:
        """Number of connections. A low rate is kept with one, whose ranges are short."""
        rate = self.most_bytes_per_s
        return 1 if rate is not None and rate < _SLOW_BYTES_PER_S else self.connections

    @property
    def range_bytes(self) -> int:
        """Longest range: about a second at a low rate, because the server sends a range as fast as it can."""
        rate = self.most_bytes_per_s
        return MAX_RANGE_BYTES if rate is None else min(MAX_RANGE_BYTES, max(_LEAST_RANGE_BYTES, rate))


def split_ranges(start: int, end: int, most_bytes: int) -> list[tuple[int, int]]:
    """Return a range as ranges of at most `most_bytes`."""
    return [(at, min(end, at + most_bytes)) for at in range(start, end, most_bytes)]


class RateLimit:
    """Bound of the bytes per second that all connections read together. The thread that takes more waits.

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


class Fetch:
    """Threads that complete a growing bundle.

    store: where the bytes are.
    folder: the bundle's folder on the store.
    linked: numbers of files that are links of checked files. They are not read.
    """

    def __init__(
        self, store: Store, folder: str, partial: PartialBundle, linked: frozenset[int], options: FetchOptions
    ) -> None:
        self._store, self._folder, self._partial, self._options = store, folder, partial, options
        self._numbers = [number for number in range(len(partial.entries)) if number not in linked]
        self._ended, self._left, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._failure: BaseException | None = None  # the first one of any thread
        self._wrong: list[int] = []
        self._rate = RateLimit(options.most_bytes_per_s, self._ended.wait)
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._is_unsynced = threading.Event()

    def run(self, copy: Callable[[Callable[[], None]], None], progress: Progress) -> None:
        """Copy, fetch and check all files. A file that differs from its digest is fetched as a whole, once.

        copy: copies what installed bundles have. It takes a function that raises an error if the pull has failed.
        progress: called with the bytes that are there and the bytes of all files.
        Raises StoreFailed, ChecksumMismatch, OSError.
        """
        self._round(self._numbers, copy, progress)
        if not self._wrong:
            return
        again, self._wrong = sorted(self._wrong), []
        for number in again:
            self._partial.reset(number)
        self._round(again, lambda check: None, progress)
        if self._wrong:
            for number in self._wrong:
                self._partial.reset(number)
            entry = self._partial.entries[self._wrong[0]]
            raise ChecksumMismatch(
                f"`{entry.name}` of `{self._store.address}` differs from its signed digest, also when fetched again",
                "send the files again: moec push BUNDLE DEST --again",
            )

    def _round(self, numbers: Sequence[int], copy: Callable[[Callable[[], None]], None], progress: Progress) -> None:
        """Complete and check some files. Those that differ from their digest are noted."""
        helpers = [self._started(self._hash, numbers), self._started(self._sync)]
        try:
            copy(self._check_failure)
            for number in numbers:
                for start, end in self._partial.missing(number):
                    parts = split_ranges(start, end, self._options.range_bytes)
                    self._waiting.extend((number, *span) for span in parts)
            count = min(self._options.used_connections, len(self._waiting))
            helpers += [self._started(self._fetch) for _ in range(count)]
            self._wait(helpers[0], progress)
        except BaseException:
            self._partial.stop()
            self._store.close()
            self._end(helpers, time.monotonic() + _LEAVE_S)
            raise
        self._end(helpers)
        self._ended.clear()
        self._check_failure()

    def _end(self, threads: Sequence[threading.Thread], until: float | None = None) -> None:
        """Wait for the end of threads. A store that cannot be interrupted may hold some of them.

        until: time after which they are left. They write nothing any more, and do not keep the process.
        """
        self._ended.set()
        self._is_unsynced.set()
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        if until is not None:
            self._left.set()

    def _started(self, work: Callable[..., None], *values: object) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*values)
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, hashing: threading.Thread, progress: Progress) -> None:
        """Report progress until all files are hashed or a thread has failed."""
        total = sum(entry.size_bytes for entry in self._partial.entries)
        while True:
            hashing.join(_LOOK_EVERY_S)
            self._check_failure()
            progress(self._partial.done_bytes, total)
            if not hashing.is_alive():
                return

    def _fetch(self) -> None:
        while not self._ended.is_set():
            try:
                number, start, end = self._waiting.popleft()
            except IndexError:
                return
            with self._partial.opened(number, os.O_WRONLY) as target:
                self._fetch_range(number, target, start, end)

    def _fetch_range(self, number: int, target: int, start: int, end: int) -> None:
        path = bundle_path(self._folder, self._partial.entries[number].name)
        noted = at = start
        try:
            for block in self._store.read(path, start, end):
                if self._left.is_set():
                    return
                write_at(target, block, at)
                at += len(block)
                if at - noted >= NOTED_BYTES:
                    self._partial.finish(number, noted, at)
                    noted = at
                if self._ended.is_set():
                    return
                self._rate.take(len(block))
        finally:
            if at > noted:
                self._partial.finish(number, noted, at)
        if at < end:  # otherwise the digest would wait for ever
            raise StoreFailed(f"`{self._store.address}/{path}` ends at byte {at}, expected {end}", "try again later")

    def _hash(self, numbers: Sequence[int]) -> None:
        """Compare files with their digests, each as its bytes arrive."""
        buffer = memoryview(bytearray(_HASHED_BYTES))
        for number in numbers:
            entry = self._partial.entries[number]
            digest, done = hashlib.sha256(), 0
            with self._partial.opened(number, os.O_RDONLY) as source:
                while done < entry.size_bytes:
                    end = self._partial.wait_beyond(number, done)
                    while done < end and not self._partial.is_stopped:
                        count = self._read(entry.name, source, buffer[: end - done], done)
                        digest.update(buffer[:count])
                        done += count
                    if self._partial.is_stopped:
                        return
            if digest.hexdigest() != entry.sha256:
                self._wrong.append(number)
            self._is_unsynced.set()

    def _read(self, name: str, source: int, buffer: memoryview, start: int) -> int:
        """Read what was written. Return the number of bytes. Raises StorageReadFailed."""
        place = f"`{self._partial.folder / name}`"
        try:
            count = os.preadv(source, [buffer], start)
        except OSError as error:
            raise StorageReadFailed(f"{place} cannot be read: {error.strerror or error}", "check the disk") from error
        if count == 0:
            raise StorageReadFailed(f"{place} has become shorter", "check the disk, and what else writes there")
        return count

    def _sync(self) -> None:
        """Make bytes durable while others arrive: after each file, and every few seconds."""
        while not self._ended.is_set():
            self._is_unsynced.wait(_SYNC_EVERY_S)
            self._is_unsynced.clear()
            self._partial.sync()
