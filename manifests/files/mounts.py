"""The file systems that this process sees, and where it sees them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(?:[^ ]+ ){3}([^ ]+) ([^ ]+) .*? - ([^ ]+) ([^ ]*)(?: ([^ ]+))?")


class Mount(NamedTuple):
    """A line of `/proc/self/mountinfo`: the folder `root` of a file system is visible at `point`."""

    root: str
    point: str
    kind: str
    source: str
    options: str


def mounts(system: Path = Path("/")) -> list[Mount]:
    """Return all mounts, the latest last; none if the system, the root folder of /proc, does not tell."""
    try:
        text = (system / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return []
    lines = (_LINE.match(line) for line in text.split("\n"))
    return [Mount(*map(_unescaped, line.groups(""))) for line in lines if line]


def mount_of(place: Path, system: Path = Path("/")) -> Mount:
    """Return the file system that holds a path without links. Its fields are empty if the system does not tell."""
    holders = (mount for mount in mounts(system) if place.is_relative_to(mount.point))
    # Of several mounts at one place the last one is visible
    return max(reversed(list(holders)), key=lambda mount: len(mount.point), default=Mount("", "", "", "", ""))


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
