"""Exchange two folders in one step where the system can."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from moec.manifests.files.output_file import FileSystem

_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""


def exchange(new: Path, old: Path, aside: Path, system: FileSystem) -> None:
    """Exchange the names of two folders.

    Where the system cannot, `old` gets the name `aside` for a moment, in which there is nothing under its name.
    Raises OSError.
    """
    if not _in_one_step(new, old):
        system.rename(old, aside)
        system.rename(new, old)
        system.rename(aside, new)
    system.sync_directory(old.parent)


def _in_one_step(first: Path, second: Path) -> bool:
    """Return whether the system exchanged two names."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result: int = call(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE)
    return result == 0
