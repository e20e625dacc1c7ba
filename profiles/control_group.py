"""Control groups of this process, versions 1 and 2: the memory and the processor time that they leave.

A group is bounded by all groups above it, so each function reads every level that this process sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from moec.manifests.files.mounts import mounts

from .processor import read_text

_SYSTEM = Path("/")
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes a limit of about 2^63 bytes where there is none."""


def group_memory_limits(system: Path = _SYSTEM) -> list[int]:
    """Return the limits that end a process, bytes. system: root folder of /proc and /sys."""
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = (_number(folder / names[version]) for version, folder in _groups(system, "memory"))
    return [limit for limit in limits if limit is not None and 0 < limit < _UNLIMITED_BYTES]


def group_free_memory(system: Path, own_bytes: int) -> list[int]:
    """Return what each limited group leaves, bytes: its limit less the memory that all its processes use.

    File cache on the inactive list counts as free, because the system gives it up first. A limit that only slows a
    process down (`memory.high`) counts, too.
    own_bytes: memory that this process uses. It stands for the use of a group that does not tell it.
    """
    free = []
    for version, folder in _groups(system, "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := _number(folder / name)) is not None]
        if not limits or not 0 < min(limits) < _UNLIMITED_BYTES:
            continue
        used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if used is not None:
            cache = r"^inactive_file ([0-9]{1,19})$" if version == 2 else r"^total_inactive_file ([0-9]{1,19})$"
            match = re.search(cache, read_text(folder / "memory.stat"), re.MULTILINE)
            used -= int(match[1]) if match else 0
        free.append(max(0, min(limits) - max(0, own_bytes if used is None else used)))
    return free


def processor_quota(system: Path = _SYSTEM) -> float:
    """Return the processors that the quotas of all groups allow, like 0.5; infinite without a quota."""
    quota = math.inf
    for version, folder in _groups(system, "cpu"):
        if version == 2:
            match = re.fullmatch(r"([0-9]{1,18}) ([0-9]{1,18})\s*", read_text(folder / "cpu.max"))
            used, period = (int(match[1]), int(match[2])) if match else (None, None)
        else:
            used, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if used and period and used > 0 < period:
            quota = min(quota, used / period)
    return quota


def _groups(system: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of the groups of this process, from its own one up to the highest that it sees.

    A container may see a part of the tree. Then the name of its group begins with the root of the mount.
    """
    all_mounts = mounts(system)
    for line in read_text(system / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        parts = _parts(group)
        version = 1 if names else 2
        folders = [
            (_parts(mount.root), system / mount.point.lstrip("/"))
            for mount in all_mounts
            if (mount.kind == "cgroup" and controller in mount.options.split(",") if names else mount.kind == "cgroup2")
        ]
        usual = system / "sys/fs/cgroup"
        for root, folder in folders or [([], usual / controller if names else usual)]:
            visible = parts[len(root) :] if parts[: len(root)] == root else parts
            level = folder.joinpath(*visible)
            yield version, level
            for _ in visible:
                level = level.parent
                yield version, level


def _parts(group: str) -> list[str]:
    return [name for name in group.split("/") if name not in ("", ".", "..")]


def _number(path: Path) -> int | None:
    """Return the number in a file; None for a word like `max`, or without the file."""
    text = read_text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
