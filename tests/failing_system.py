"""A file system whose n-th operation fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from moec.manifests.files.output_file import FileSystem

OPERATIONS = ("open", "write", "sync", "rename", "sync_directory", "make_directory", "link")


class Countdown:
    """Lets the n-th operation of a file system fail. left: operations until then; negative after it."""

    def __init__(self, system: FileSystem, nth: int, number: int = errno.ENOSPC) -> None:
        self.left, self._number = nth, number
        for name in OPERATIONS:
            setattr(system, name, self._counted(getattr(system, name)))

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: object) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(self._number, os.strerror(self._number))
            return operation(*values)

        return call
