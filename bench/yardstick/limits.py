"""Control groups that bound the memory (page cache included) and the read rate of a command. Linux, root.

Version 1 (`memory`, `blkio`) and version 2 (`memory.max`, `io.max`) of control groups are supported.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


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
    found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return found if (found / "queue").exists() else found.parent  # a partition has no queue of its own


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
    number = _device_folder(place).joinpath("dev").read_text().strip()
    groups = _make_groups(memory_bytes, read_bytes_per_s, number)

    def enter() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        first = ""
        if before:
            first = subprocess.run(before, stdout=subprocess.PIPE, preexec_fn=enter, text=True, check=True).stdout
        done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=enter, text=True, check=False)
        return Finished(done.returncode, done.stdout, first, *_counts(groups))
    finally:
        for group in groups:
            _remove(group)


def _make_groups(memory_bytes: int | None, read_bytes_per_s: int | None, device: str) -> list[Path]:
    name, groups = f"moec-bench-{os.getpid()}", []
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


def _counts(groups: list[Path]) -> tuple[int | None, int | None]:
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
