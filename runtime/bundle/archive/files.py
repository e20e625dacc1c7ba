"""Write archives and unpacked bundles: check free space, and turn errors of the system into errors for users."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moec.manifests.errors import DiskFull, InputError


@contextmanager
def file_errors(place: Path) -> Iterator[None]:
    """Turn a full disk into DiskFull and other refusals of the system into InputError, both naming the place."""
    try:
        yield
    except OSError as error:
        name = error.filename or place
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"the disk of `{place}` is full", "free space and run the command again") from error
        raise InputError(f"`{name}`: {error.strerror or error}", "check path and permissions") from error


def require_free_bytes(folder: Path, need_bytes: int) -> None:
    """Raise DiskFull if the file system of an existing folder has less than need_bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise DiskFull(
            f"the disk of `{folder}` has {free} bytes free, {need_bytes} are needed",
            "free space, or choose another disk",
        )
