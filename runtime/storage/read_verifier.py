"""Compare experts that were read with the checksums of the manifest, as often as needed.

An expert is compared when it is first read, and again when anything about its file has changed.
One call of `fstat` after each read shows that. The time of both: docs/design/storage.md, Verification.
With the cache in C++, `serve` in native/experts/reader_threads.cpp decides when, and calls `compare`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from moec.manifests.bundle import ExpertEntry
from moec.manifests.errors import ChecksumMismatch

from ..bundle.files import COPY_AGAIN, BundleFile, FileIdentity

SETTLED_NS = 2_000_000_000
"""Age in ns from which an identity is trusted. A younger file may change again without another time stamp."""


class ReadVerifier:
    """Compares experts with their checksums. Several reader threads may use it at once.

    An expert is trusted without a comparison if its file has kept one identity. It must have kept it from before a read
    that was compared until after this read. Then no write happened in between.
    """

    def __init__(self, entries: Sequence[ExpertEntry], files: Mapping[str, BundleFile], is_enabled: bool) -> None:
        """Create a verifier.

        files: open files of the entries; closing the storage empties it.
        is_enabled: whether anything is compared.
        """
        self._entries, self._files, self._is_enabled = entries, files, is_enabled
        known = {name: file.identity() for name, file in files.items()} if is_enabled else {}
        self._known: dict[str, FileIdentity] = known
        self._paths = {name: file.path for name, file in files.items()}
        self._verified: list[FileIdentity | None] = [None] * len(entries)

    def begin(self, file: str) -> FileIdentity | None:
        """Return the state before a read, for `end`."""
        return self._known.get(file)

    def end(self, run: Sequence[int], blocks: Sequence[np.ndarray], before: FileIdentity | None) -> None:
        """Compare experts of one file after a read, if needed.

        blocks: their bytes, uint8 [size_bytes] each.
        before: result of `begin`.
        Raises ChecksumMismatch.
        """
        if not self._is_enabled:
            return
        file = self._entries[run[0]].file
        after = self._files[file].identity()
        is_same = after == before
        if not is_same:
            self._known[file] = after
        for index, block in zip(run, blocks, strict=True):
            if is_same and self._verified[index] == after:
                continue
            self.compare(index, block)
            self._verified[index] = after if is_same and is_settled(after) else None

    def compare(self, index: int, block: np.ndarray) -> None:
        """Compare the bytes of an expert with its checksum. Raises ChecksumMismatch."""
        entry = self._entries[index]
        if self._is_enabled and xxhash.xxh3_128_hexdigest(block.data) != entry.xxh3:
            raise ChecksumMismatch(
                f"`{self._paths[entry.file]}`, expert {entry.expert} of layer {entry.layer}: bytes differ from "
                "their checksum",
                COPY_AGAIN,
            )


def is_settled(identity: FileIdentity) -> bool:
    """Return whether a file's last change is so old that another one would have another time stamp."""
    return time.time_ns() - identity[2] > SETTLED_NS
