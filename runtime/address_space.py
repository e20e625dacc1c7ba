"""Anonymous memory whose pages come into being when they are touched."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from moec.manifests.errors import MemoryBudgetExceeded

_MAP_NORESERVE = 0x4000


def map_anonymous(size_bytes: int, what: str, huge_pages: bool) -> tuple[mmap.mmap, np.ndarray]:
    """Zeroed addresses, and uint8 [size_bytes] over them; what: their use, for the error.

    huge_pages: for memory that is filled from end to end and stays. They read 5 to 8 % faster (fewer misses of the
    address cache) but one touched byte makes up to 2 MiB resident. Raises MemoryBudgetExceeded if the system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=flags)
    except OSError as error:
        raise MemoryBudgetExceeded(
            f"the system refuses {size_bytes} bytes of addresses for {what}: {error.strerror}",
            "take `--io mmap`, or raise the limit of the process's address space",
        ) from error
    # EINVAL: the system has no huge pages.
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return mapped, np.frombuffer(mapped, np.uint8)
