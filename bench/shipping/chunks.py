"""Content-defined chunks of files: cuts where a rolling sum of the last bytes has zeros, as in casync and Xet.

The sum is that of Gear hashing: h = 2 h + g[byte]. Its low 16 bits depend on the last 16 bytes alone, so all places are
computed at once. Source: Xia et al., FastCDC, USENIX ATC 2016, section 3.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MEAN_BITS = 16
"""A cut comes after 2^MEAN_BITS bytes on average, in addition to the shortest chunk."""
SHORTEST, LONGEST = 8 << 10, 128 << 10
_BLOCK = 32 << 20


class Chunks:
    """Chunks of files by digest and size."""

    def __init__(self, seed: int = 5) -> None:
        self._gear = np.random.default_rng(seed).integers(0, 1 << 16, 256, dtype=np.uint16)

    def of(self, path: Path) -> Iterator[tuple[bytes, int]]:
        """Yield digest and size of each chunk of a file."""
        data = np.fromfile(path, np.uint8)
        start = 0
        cuts = self._cuts(data)
        at = 0
        while start < len(data):
            end = min(start + LONGEST, len(data))
            at = int(np.searchsorted(cuts, start + SHORTEST))
            if at < len(cuts) and cuts[at] < end:
                end = int(cuts[at])
            yield hashlib.blake2b(data[start:end].data, digest_size=16).digest(), end - start
            start = end

    def _cuts(self, data: np.ndarray) -> np.ndarray:
        """Return the places after which the low bits of the sum are zero."""
        chunks = []
        for begin in range(0, len(data), _BLOCK):
            first = max(0, begin - MEAN_BITS + 1)
            values = self._gear[data[first : begin + _BLOCK]]
            total = np.zeros(len(values), np.uint16)
            for back in range(min(MEAN_BITS, len(values))):
                total[back:] += values[: len(values) - back] << np.uint16(back)
            places = np.flatnonzero(total == 0) + first + 1
            chunks.append(places[places > begin])
        return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
