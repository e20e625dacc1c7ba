"""Rate at which memory can be read: the upper bound of decoding with resident weights."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moec.profiles.probe import available_memory_bytes

MOST_BYTES = 4 << 30  # several times any last-level cache
LEAST_BYTES = 64 << 20
LARGE_BYTES = 512 << 20
"""Size that some last-level caches nearly hold. A larger model needs a buffer that no cache holds."""
_PASSES = 3
_PARTS_PER_THREAD = 8


def buffer_bytes(working_set_bytes: int) -> int:
    """Return the bytes to read for a model of this size.

    They are the size of the model, 4 GiB for a large model, and at most half of free memory.
    """
    size_bytes = MOST_BYTES if working_set_bytes > LARGE_BYTES else working_set_bytes
    return max(LEAST_BYTES, min(size_bytes, available_memory_bytes() // 2))


def read_bytes_per_s(size_bytes: int, threads: int) -> int:
    """Return the bytes per second that threads read from memory in sum: the best of three sums over a buffer."""
    buffer = np.ones(size_bytes // 8, np.uint64)
    parts = np.array_split(buffer, threads * _PARTS_PER_THREAD)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            best_s = min(best_s, time.perf_counter() - start)
    return int(buffer.nbytes / best_s)
