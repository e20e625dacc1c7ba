"""A control group that limits the memory of one process, page cache included. Linux, as root.

Both versions are supported: version 1 (`memory`) and version 2 (`memory.max`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SYSTEM = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The files of one group, with the names of its version."""

    path: Path
    is_version_2: bool

    @property
    def processes(self) -> Path:
        """File of the process numbers. A process whose number is written to it enters the group."""
        return self.path / "cgroup.procs"

    @property
    def usage(self) -> Path:
        """File of the charged bytes."""
        return self.path / ("memory.current" if self.is_version_2 else "memory.usage_in_bytes")

    def limit(self, size_bytes: int) -> None:
        """Set the limit, without swap. Beyond it page cache is dropped, and without page cache a process is killed."""
        names = ("max", "swap.max") if self.is_version_2 else ("limit_in_bytes", "swappiness")
        (self.path / f"memory.{names[0]}").write_text(str(size_bytes))
        with contextlib.suppress(FileNotFoundError):  # the system has no swap accounting
            (self.path / f"memory.{names[1]}").write_text("0")

    def times_full(self) -> int:
        """Return how often the limit was reached, also by page cache."""
        if self.is_version_2:
            return self._counts("memory.events")["max"]
        return int((self.path / "memory.failcnt").read_text())

    def kills(self) -> int:
        """Return the number of processes that the system killed because memory was full."""
        return self._counts("memory.events" if self.is_version_2 else "memory.oom_control")["oom_kill"]

    def _counts(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in (self.path / name).read_text().splitlines())
        return {key: int(value) for key, value in pairs}


@contextlib.contextmanager
def memory_group(limit_bytes: int | None = None) -> Iterator[MemoryGroup]:
    """Make a new group. The test is skipped if that is not possible."""
    with contextlib.ExitStack() as made:
        try:
            parent = parent_group()
            group = MemoryGroup(parent.path / f"moec-g6-{os.getpid()}", parent.is_version_2)
            group.path.mkdir()
            made.callback(_remove, group.path)
            if limit_bytes is not None:
                group.limit(limit_bytes)
        except OSError as error:
            pytest.skip(f"NOT RUN: no control groups of memory here: {error}")
        yield group


def _remove(path: Path) -> None:
    for _ in range(600):  # the last thread of a process leaves its group after the end of the process
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.1)
    path.rmdir()


def parent_group(system: Path = SYSTEM) -> MemoryGroup:
    """Return the group in which new groups can be made.

    It is the group of this process. In version 2 it is the nearest parent whose children have the memory controller.
    Raises OSError if there is none.
    """
    root, own = system / "sys/fs/cgroup", ""
    for line in (system / "proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if "memory" in names.split(","):
            inside = root / "memory" / path.lstrip("/")  # a container may not see the name of its group
            return MemoryGroup(inside if inside.exists() else root / "memory", is_version_2=False)
        own = path if names == "" else own
    parts = [part for part in own.split("/") if part]
    for depth in range(len(parts), -1, -1):
        above = root.joinpath(*parts[:depth])
        if "memory" in (above / "cgroup.subtree_control").read_text().split():
            return MemoryGroup(above, is_version_2=True)
    raise OSError("no group gives its children the controller of memory")
