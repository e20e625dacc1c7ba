"""Whether experts that were read are the ones of the manifest: compared with their checksums, as often as is needed.

An expert is compared when it is first read, and again as soon as anything about its file has changed: one call of
`fstat` after each read tells, in 0.3 us, where the XXH3 of 4 MiB takes 0.5 ms (docs/architecture.md, Reads).
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
"""Age, ns, from which an identity is trusted: a younger file may change again without another time stamp."""


class ReadVerifier:
    """Compares experts with their checksums. Used by several reader threads at once.

    An expert is trusted without a comparison if its file had one identity from before a read that was compared until
    after this one. So nothing was written in between.
    """

    def __init__(self, entries: Sequence[ExpertEntry], files: Mapping[str, BundleFile], is_enabled: bool) -> None:
        """files: of the entries, open; emptied by who closes them. is_enabled: whether anything is compared."""
        self._entries, self._files, self._is_enabled = entries, files, is_enabled
        known = {name: file.identity() for name, file in files.items()} if is_enabled else {}
        self._known: dict[str, FileIdentity] = known
        self._paths = {name: file.path for name, file in files.items()}
        self._verified: list[FileIdentity | None] = [None] * len(entries)

    def begin(self, file: str) -> FileIdentity | None:
        """Before a read: what `end` wants to know."""
        return self._known.get(file)

    def end(self, run: Sequence[int], blocks: Sequence[np.ndarray], before: FileIdentity | None) -> None:
        """After a read of experts of one file: compare them if needed.

        blocks: their bytes, uint8 [size_bytes] each. before: from `begin`. Raises ChecksumMismatch.
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
    """Whether a file's last change is so long ago that another one would have another time stamp."""
    return time.time_ns() - identity[2] > SETTLED_NS
