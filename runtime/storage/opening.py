"""Choose how experts are read: `--io`."""

from __future__ import annotations

from ..bundle.opening import Bundle
from ..options.runtime import IoMode
from .interface import ExpertStorage
from .read_storage import ReadStorage


def open_storage(bundle: Bundle, io: IoMode, verify: bool, capacity_bytes: int | None = None) -> ExpertStorage:
    """`auto` is direct reads where the file system allows them, else buffered reads that drop what they read.

    capacity_bytes: what experts may take together, at least the largest; None: all of them.
    """
    if io == "mmap":
        from .mapped_storage import MappedStorage

        return MappedStorage(bundle, verify)
    return ReadStorage(bundle, io, verify, capacity_bytes)
