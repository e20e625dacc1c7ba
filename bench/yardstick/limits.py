"""Control groups that bound the memory (page cache included) and the read rate of a command. Linux, root.

Version 1 (`memory`, `blkio`) and version 2 (`memory.max`, `io.max`) of control groups are supported.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Finished:
    """The result of a command.

    output: standard output of the command.
    before: standard output of the command before it.
    peak_bytes: largest memory of the group.
    limit_hits: how often the group reached its limit.
    """

    status: int
    output: str
    before: str
    peak_bytes: int | None
    limit_hits: int | None


def read_ahead_path(folder: Path) -> Path:
    """Return the file that sets the read-ahead of the device of a folder, in KiB."""
    return _device_folder(folder) / "queue" / "read_ahead_kb"


def _device_folder(folder: Path) -> Path:
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return device if (device / "queue").exists() else device.parent  # a partition has no queue of its own


def drop_caches() -> None:
    """Empty the page cache of the whole machine."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def run_limited(
    command: Sequence[str],
    memory_bytes: int | None = None,
    read_bytes_per_s: int | None = None,
    place: Path = Path(),
    before: Sequence[str] = (),
) -> Finished:
    """Run a command inside the limits.

    place: a folder on the device whose reads are bounded.
    before: a command that runs first, in the same groups.
    Raises subprocess.CalledProcessError if `before` fails.
    """
    with control_group(memory_bytes, read_bytes_per_s, place) as group:
        first = ""
        if before:
            first = subprocess.run(before, stdout=subprocess.PIPE, preexec_fn=group.enter, text=True, check=True).stdout
        done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=group.enter, text=True, check=False)
        return Finished(done.returncode, done.stdout, first, *group.counts())


@dataclass(frozen=True)
class ControlGroup:
    """A control group with limits, in one folder per controller; without limits there may be none."""

    folders: tuple[Path, ...]

    def enter(self) -> None:
        """Put this process into the group. Processes that it starts are in it, too."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def start(self, command: Sequence[str], output: IO[str]) -> subprocess.Popen[bytes]:
        """Start a command in the group. Both of its outputs go to a file."""
        options: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "preexec_fn": self.enter}
        return subprocess.Popen(command, **options)

    def counts(self) -> tuple[int | None, int | None]:
        """Return the largest memory of the group, and how often it reached its limit."""
        return _counts(self.folders)


@contextlib.contextmanager
def control_group(
    memory_bytes: int | None = None, read_bytes_per_s: int | None = None, place: Path = Path()
) -> Iterator[ControlGroup]:
    """Make a control group, and remove it at the end. Its processes must have ended by then.

    place: as in `run_limited`.
    """
    number = _device_folder(place).joinpath("dev").read_text().strip() if read_bytes_per_s is not None else ""
    folders = _make_groups(memory_bytes, read_bytes_per_s, number)
    try:
        yield ControlGroup(tuple(folders))
    finally:
        for folder in folders:
            _remove(folder)


def _make_groups(memory_bytes: int | None, read_bytes_per_s: int | None, device: str) -> list[Path]:
    name, groups = f"moec-bench-{os.getpid()}-{next(_NUMBERS)}", []
    if (ROOT / "cgroup.controllers").exists():
        group = ROOT / name
        group.mkdir()
        if memory_bytes is not None:
            (group / "memory.max").write_text(str(memory_bytes))
            (group / "memory.swap.max").write_text("0")
        if read_bytes_per_s is not None:
            (group / "io.max").write_text(f"{device} rbps={read_bytes_per_s}")
        return [group]
    if memory_bytes is not None:
        groups.append(_own_group("memory") / name)
        groups[-1].mkdir()
        (groups[-1] / "memory.limit_in_bytes").write_text(str(memory_bytes))
    if read_bytes_per_s is not None:
        groups.append(_own_group("blkio") / name)
        groups[-1].mkdir()
        (groups[-1] / "blkio.throttle.read_bps_device").write_text(f"{device} {read_bytes_per_s}")
    return groups


def _own_group(controller: str) -> Path:
    """Return the group of version 1 that this process is in. Raises SystemExit without such a controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return ROOT / controller / path.lstrip("/")
    raise SystemExit(f"no controller `{controller}` here")


def _counts(groups: Sequence[Path]) -> tuple[int | None, int | None]:
    for group in groups:
        if (group / "memory.max_usage_in_bytes").exists():
            counts = [int((group / f"memory.{name}").read_text()) for name in ("max_usage_in_bytes", "failcnt")]
            return counts[0], counts[1]
        if (group / "memory.peak").exists():
            events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
            return int((group / "memory.peak").read_text()), int(events["max"])
    return None, None


def _remove(group: Path) -> None:
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
