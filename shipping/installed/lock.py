"""The lock of a device's folder: one process changes it at a time. Readers and engines need no lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from moec.manifests.errors import TryAgain

from .places import Places


@contextmanager
def locked(places: Places) -> Iterator[None]:
    """Hold the lock of an existing folder. The system gives it back when the process ends in any way.

    Raises TryAgain if another process holds it. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(places.lock, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TryAgain(
                f"another `moec pull` or `moec rollback` works in `{places.folder}`", "wait until it has ended"
            ) from error
        yield
    finally:
        os.close(descriptor)
