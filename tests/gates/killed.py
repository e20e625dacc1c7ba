"""Compiles that are killed at a disk operation. As a program: one killed process for each named operation.

python -m tests.gates.killed WAY FOLDER MODEL DATA OLD_BUNDLE N...
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moec.compiler.request.plan import CompileResult
from moec.compiler.workspace.durable import Disk
from tests.tiny_compile import compile_tiny, little_memory

OPERATIONS = ("open", "write", "sync", "sync_file", "sync_directory", "rename", "make_directory", "remove_tree")
KILLED = 9
WAYS = ("all layers stay", "little memory")


def go(way: str, patch: Callable[[str, Any], None]) -> None:
    """Compile in one of two ways: all layers stay in memory, or none stays between passes.

    patch: sets an attribute.
    """
    if way != WAYS[0]:
        little_memory(patch)


def compile_here(folder: Path, model: Path, data: Path, disk: Disk, **values: Any) -> CompileResult:
    """Run the compile that this gate interrupts: a search on data, over an existing bundle."""
    return compile_tiny(
        model, folder / "out", "kl", 0.05, data=str(data), disk=disk, bits=(3, 16), overwrite=True, **values
    )


class WatchedDisk(Disk):
    """A disk that records operation and path of every step.

    before: called with the number of each step, counted from 1.
    """

    def __init__(self, before: Callable[[int, str, Any], None] = lambda number, name, subject: None) -> None:
        self.steps: list[tuple[str, Path]] = []
        self._before = before

    def _note(self, name: str, subject: Any) -> None:
        path = Path(subject if isinstance(subject, Path) else subject.name)
        if name == "remove_tree" and not os.path.lexists(path):
            return
        self.steps.append((name, path))
        self._before(len(self.steps), name, subject)


def _watched(name: str) -> Callable[..., Any]:
    plain = getattr(Disk, name)

    def operation(self: WatchedDisk, subject: Any, *rest: Any) -> Any:
        self._note(name, subject)
        return plain(self, subject, *rest)

    return operation


for _name in OPERATIONS:
    setattr(WatchedDisk, _name, _watched(_name))


def kill_at(wanted: int) -> WatchedDisk:
    """Return a disk whose process ends at once at that operation. A write is cut in half."""

    def check(number: int, name: str, subject: Any) -> None:
        if number == wanted:
            if name == "write":
                subject.write(b"half of what was to come")
                subject.flush()
            os._exit(KILLED)

    return WatchedDisk(check)


def main(folder: Path, model: Path, data: Path, old: Path, numbers: list[int]) -> None:
    """Run the killed processes. Each is a fork of this one, so imports are done once."""
    for number in numbers:
        place = folder / str(number)
        place.mkdir()
        shutil.copytree(old, place / "out")
        child = os.fork()
        if child == 0:
            compile_here(place, model, data, kill_at(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(number, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    import pytest
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        go(sys.argv[1], patched.setattr)
        main(*map(Path, sys.argv[2:6]), [int(text) for text in sys.argv[6:]])
