"""StreamingCache: what the model asks of a cache of experts, whoever does the reading.

`stream(keys)` yields experts ready to compute, hits first, misses as they arrive; an expert is leased while the
caller holds it and is never evicted then. `prefetch(keys)` is advice: it may read, it never changes a result.
`warm(keys)` fills free capacity behind everything else. A few reader threads serve all three in this order; advice that
has gone stale is dropped unread.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

import numpy as np

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded

from ..storage.readers import ReaderThreads
from .counts import CacheStats
from .residency import LOADING, RESIDENT
from .serve_layer import serve_layer


class StreamingCache(ABC):
    """Residency of all routed experts of one bundle.

    Invariant: bytes of queued, loading and resident experts never exceed the capacity.
    sizes: padded bytes per expert, int64 [N]. state: int8 [N]. prefetches: int64 [2, N], as in Residency.
    """

    prefetches: np.ndarray
    _readers: ReaderThreads

    def __init__(self, sizes: np.ndarray, state: np.ndarray) -> None:
        self._sizes, self._state, self._process = sizes, state, os.getpid()

    @property
    @abstractmethod
    def stats(self) -> CacheStats:
        """Counts so far."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """What queued, loading and resident experts may take together."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What they take now."""

    def holds(self, index: int) -> bool:
        """Whether an expert is in memory or on its way; advice that has not begun may yet be dropped."""
        return bool(self._state[index] in (LOADING, RESIDENT))

    def has(self, index: int) -> bool:
        """Whether an expert is in memory now."""
        return bool(self._state[index] == RESIDENT)

    @abstractmethod
    def resident(self) -> np.ndarray:
        """Indices now in memory."""

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
        together: bool = False,
    ) -> Generator[list[int], None, None]:
        """Yield each index once, when it is resident; it stays leased until the next ones are asked for.

        together: all that are resident at once come in one list, else each in its own.
        look_ahead: experts likely to be needed next, likeliest first; asked once this layer's reads are under way, and
        behind its first hits if there are any, because what it names waits for those reads.
        Raises StorageReadFailed or ChecksumMismatch from the reader, MemoryBudgetExceeded if an expert cannot fit,
        ExecutionError after `close`.
        """
        self._require_process()
        # Reads start before the hits compute, so that the two overlap.
        hits, misses = self._begin(layer, indices)
        yield from serve_layer(self, hits, misses, look_ahead, together)

    @abstractmethod
    def _begin(self, layer: int, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """A layer asks: what is there, leased, and what is not, its reads queued as far as there is room."""

    @abstractmethod
    def wait_for_some(self, remaining: list[int], together: bool) -> list[int]:
        """Block until one of the remaining experts is resident, and return it, or with `together` all that are.

        Reads that had no room are started as room appears.
        """

    @abstractmethod
    def unlease(self, indices: Sequence[int]) -> None:
        """These have been computed, or will not be."""

    @abstractmethod
    def prefetch(self, indices: Sequence[int]) -> None:
        """Read these experts ahead, likeliest first, as far as room and the pin limit go. Replaces older advice."""

    @abstractmethod
    def warm(self, indices: Sequence[int]) -> None:
        """Fill free capacity, first index first, while nothing more urgent is to be read; evicts nothing.

        An expert that cannot be read is left out: who asks for it is told why.
        """

    @abstractmethod
    def finish_warming(self) -> None:
        """Block until the warm start has filled what it can."""

    @abstractmethod
    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity between passes: what no longer fits is evicted and its memory given back.

        Blocks while reads that are under way stand in the way; capacity_bytes must hold a token's experts of a layer.
        Raises ExecutionError in a forked process.
        """

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise RuntimeError if the ledger and the states disagree (for tests)."""

    @abstractmethod
    def close(self) -> None:
        """Stop the readers; a forked process has none."""

    @property
    def _is_forked(self) -> bool:
        """Then the reader threads, and perhaps a lock, stayed behind."""
        return os.getpid() != self._process

    def _require_process(self) -> None:
        if self._is_forked:
            raise ExecutionError("the engine was loaded before this process was forked", "load the bundle in the child")

    def _closed_error(self) -> ExecutionError:
        return ExecutionError("the expert cache is closed", "load the bundle again")

    def _too_large_error(self, index: int) -> MemoryBudgetExceeded:
        return MemoryBudgetExceeded(
            f"an expert of {self._sizes[index]} bytes does not fit into the expert cache of {self.capacity_bytes}",
            "raise `--memory` or `--expert-cache`",
        )

    def _check(self, used_bytes: int, held_bytes: int) -> None:
        if held_bytes != used_bytes or held_bytes > self.capacity_bytes:
            raise RuntimeError(f"ledger {used_bytes}, held {held_bytes}, capacity {self.capacity_bytes}")
