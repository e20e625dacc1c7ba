"""StreamingCache: the interface of an expert cache to the model.

`stream` yields experts that are ready to compute: hits first, then misses as they arrive. An expert is leased while the
caller holds it. A leased expert is never evicted.
`prefetch` is advice. It may start reads, and it never changes a result. Newer advice replaces older advice.
`warm` fills free capacity.
Reader threads serve `stream` first, then `prefetch`, then `warm`. Under the rule `until-routed`, a reader of its own
serves `prefetch`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

import numpy as np

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded

from ..storage.readers import ReaderThreads
from .cache_spec import LOADING, RESIDENT
from .cache_stats import CacheStats
from .serve_layer import serve_layer, too_large_error


class StreamingCache(ABC):
    """Residency of all routed experts of one bundle.

    Invariant: bytes of queued, loading and resident experts never exceed the capacity.

    sizes: padded bytes per expert, int64 [N].
    state: state of each expert, int8 [N].
    prefetches: reads ahead of each expert, and those requested in time, int64 [2, N].
    """

    prefetches: np.ndarray
    _readers: ReaderThreads

    def __init__(self, sizes: np.ndarray, state: np.ndarray) -> None:
        self._sizes, self._state, self._process = sizes, state, os.getpid()

    @property
    @abstractmethod
    def stats(self) -> CacheStats:
        """Counts since the cache was opened."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes that queued, loading and resident experts may take in all."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that queued, loading and resident experts take now."""

    def is_loading_or_resident(self, index: int) -> bool:
        """Return whether an expert is in memory or being read. A queued read does not count: it may be dropped."""
        return bool(self._state[index] in (LOADING, RESIDENT))

    def is_resident(self, index: int) -> bool:
        """Return whether an expert is in memory now."""
        return bool(self._state[index] == RESIDENT)

    def states(self) -> np.ndarray:
        """Return a copy of the state of each expert, int8 [N], values of `cache_spec.py`. Any thread may ask."""
        return self._state.copy()

    @abstractmethod
    def resident(self) -> np.ndarray:
        """Return the experts that are in memory now, ascending, int64."""

    @abstractmethod
    def leased(self) -> np.ndarray:
        """Return the experts that a layer holds or waits for, ascending, int64. None of them is evicted."""

    @property
    def running_readers(self) -> int:
        """Reader threads that have started and have not ended."""
        return self._readers.running()

    def stream(
        self,
        layer: int,
        indices: Sequence[int],
        look_ahead: Callable[[], Sequence[int]] = lambda: (),
        all_at_once: bool = False,
    ) -> Generator[list[int], None, None]:
        """Yield each expert of a layer once, when it is resident. It stays leased until the next ones are requested.

        look_ahead: returns the experts likely to be needed next, likeliest first. `serve_layer` says when it is called.
        all_at_once: yield all resident experts in one list, else one at a time.
        Raises StorageReadFailed or ChecksumMismatch from the reader, MemoryBudgetExceeded if an expert cannot fit,
        ExecutionError after `close`.
        """
        self._require_process()
        # Reads start before the hits compute, so that the two overlap.
        hits, misses = self._request_and_queue(layer, indices)
        yield from serve_layer(self, hits, misses, look_ahead, all_at_once)

    @abstractmethod
    def _request_and_queue(self, layer: int, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Request the experts of a layer. Returns hits and misses.

        Hits are leased. Reads of misses are queued as far as they fit.
        """

    @abstractmethod
    def wait_for_some(self, remaining: list[int], all_at_once: bool) -> list[int]:
        """Return the first remaining expert that is resident; if `all_at_once`, all that are. Block until there is one.

        Reads that did not fit are started as memory becomes free.
        """

    @abstractmethod
    def unlease(self, indices: Sequence[int]) -> None:
        """Release experts that have been computed, or will not be."""

    @abstractmethod
    def prefetch(self, indices: Sequence[int]) -> None:
        """Read experts ahead, likeliest first, as far as free memory and the pin limit allow. Replaces older advice."""

    @abstractmethod
    def begin_sequence(self) -> None:
        """Restart the counts of passes and uses of a sequence, by which some policies evict."""

    @abstractmethod
    def warm(self, indices: Sequence[int]) -> None:
        """Fill free capacity in the given order, while there is no more urgent read. Evicts nothing.

        An expert that cannot be read is left out. A later `stream` of this expert raises the error.
        """

    @abstractmethod
    def finish_warming(self) -> None:
        """Block until the warm start has filled what it can."""

    @abstractmethod
    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity between passes. Experts that no longer fit are evicted, and their memory is freed.

        Blocks until reads have ended whose experts no longer fit.
        capacity_bytes: must hold the experts that one token needs in a layer.
        Raises ExecutionError in a forked process.
        """

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise RuntimeError if the ledger and the states disagree (for tests)."""

    @abstractmethod
    def close(self) -> None:
        """Stop the readers. A forked process has none."""

    @property
    def _is_forked(self) -> bool:
        """True if this process was forked after the cache was opened.

        Then it has no reader threads, and a lock may be held forever.
        """
        return os.getpid() != self._process

    def _require_process(self) -> None:
        if self._is_forked:
            raise ExecutionError("the engine was loaded before this process was forked", "load the bundle in the child")

    def _closed_error(self) -> ExecutionError:
        return ExecutionError("the expert cache is closed", "load the bundle again")

    def _too_large_error(self, index: int) -> MemoryBudgetExceeded:
        return too_large_error(int(self._sizes[index]), self.capacity_bytes)

    def _check(self, used_bytes: int, held_bytes: int) -> None:
        if held_bytes != used_bytes or held_bytes > self.capacity_bytes:
            raise RuntimeError(f"ledger {used_bytes}, held {held_bytes}, capacity {self.capacity_bytes}")
