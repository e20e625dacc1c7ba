"""Choose how experts are read: option `--io`."""

from __future__ import annotations

from ..bundle.open_bundle import Bundle
from ..options.runtime import IoMode
from .interface import NativeStorage
from .read_storage import ReadStorage


def open_storage(bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> NativeStorage:
    """Open the storage of a bundle.

    `auto` uses direct reads if the file system allows them. Otherwise it uses buffered reads that drop the page cache.
    capacity_bytes: most bytes of all experts in memory, at least the largest expert; None for all experts.
    """
    if io == "mmap":
        from .mapped_storage import MappedStorage

        return MappedStorage(bundle, verify)
    return ReadStorage(bundle, io, verify, capacity_bytes)
