"""Files for parsers that take a path: one folder per process, removed at its end."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="moec-fuzz-", dir=memory if memory.is_dir() else None)


def file_of(name: str, data: bytes) -> Path:
    """A file with these bytes; the next of the same name replaces it."""
    path = Path(_folder().name) / name
    path.write_bytes(data)
    return path
