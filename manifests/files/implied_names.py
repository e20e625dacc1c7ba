"""Names that the program derives and no user gave: no link is followed there, and nothing of others is lost.

A file is replaced only if it has the mark of a file that moec writes under this name.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ..errors import InputError
from .input_file import UnreadableFile, kind_name, read_input
from .output_file import AtomicFile, FileSystem, check_output, temporary_path, write_errors

MAX_IMPLIED_BYTES = 64 << 20
"""Size of a file that is searched for its mark, bytes. A larger one is not replaced."""
_MOVE = "move it"


def is_implied_folder(path: Path) -> bool:
    """Return whether a folder stands at a derived name; False if nothing does.

    Raises InputError for a link, a file or anything else there.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"`{path}` cannot be used: {reason}", "check path and permissions") from error
    if not stat.S_ISDIR(mode):
        raise InputError(f"`{path}` is {kind_name(mode)}, expected a folder that moec made", _MOVE)
    return True


def check_implied(path: Path, mark: re.Pattern[bytes], remedy: str = _MOVE) -> None:
    """Check before any work whether `write_implied` can write this file. The check leaves nothing.

    Raises InputError, DiskFull.
    """
    try:
        content = read_input(path, MAX_IMPLIED_BYTES)
    except UnreadableFile as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise InputError(f"`{path}` {error}, so it is not replaced", remedy) from error
    else:
        if mark.search(content) is None:
            raise InputError(f"`{path}` was not written by moec, so it is not replaced", remedy)
    check_output(path)


def write_implied(path: Path, data: bytes, mark: re.Pattern[bytes], remedy: str = _MOVE) -> None:
    """Write a file under a derived name. It appears whole, and a link that appears there meanwhile is not followed.

    mark: found in `data`, and in every file that this one may replace.
    remedy: for a file that may not be replaced.
    Raises InputError, DiskFull.
    """
    if mark.search(data) is None:
        raise ValueError(f"the content of `{path}` has no mark")
    check_implied(path, mark, remedy)
    with write_errors(path), AtomicFile(path, temporary_path(path), FileSystem()) as file:
        file.write(data)
