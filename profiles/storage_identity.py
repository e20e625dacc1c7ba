"""Which storage a file lies on: what the system tells, nothing measured, the same after a restart or a new mount."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

_SYSTEM = Path("/")
# Files under a block device in /sys that tell it from others; each driver has some of them. Names and numbers of
# devices are not among them: both may change with a restart.
_DISK_FACTS = (
    "device/model",
    "device/serial",
    "device/wwid",
    "device/cid",
    "serial",
    "wwid",
    "queue/rotational",
    "size",
    "loop/backing_file",
)
# Of a device that lies on others: encryption, volumes, arrays.
_MAPPING_FACTS = ("dm/uuid", "md/level")


def storage_sha256(place: Path, system: Path = _SYSTEM) -> str:
    """Digest of the storage that an existing file or folder lies on: its disks and the type of its file system.

    Where no disk is told (network, memory, containers), the type and the mount's source. Two disks of one model are
    two, if they tell a serial number. system: the root that /proc and /sys are found under. Raises OSError.
    """
    device = place.stat().st_dev
    kind, source = _mount(place.resolve(), system)
    blocks = [system / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"]
    if source.startswith("/dev/"):  # some file systems, btrfs for one, number their devices themselves
        blocks.append(system / "sys/class/block" / (system / source.lstrip("/")).resolve().name)
    told = next((disks for block in blocks if any(disks := _disks(block))), source)
    return hashlib.sha256(json.dumps([kind, told]).encode()).hexdigest()


def _disks(block: Path) -> list[list[str]]:
    """What a block device in /sys and the disks below it tell, in an order of their own; nothing if it is not there."""
    block = block.resolve()
    if not block.is_dir():
        return []
    if (block / "partition").exists():
        block = block.parent
    below = sorted(disk for slave in (block / "slaves").glob("*") for disk in _disks(slave))
    names = _MAPPING_FACTS if below else _DISK_FACTS
    return [[f"{name} {text}" for name in names if (text := _text(block / name))], *below]


def _mount(place: Path, system: Path) -> tuple[str, str]:
    """Type and source of the file system that holds a path without links; empty where the system does not tell."""
    longest, found = 0, ("", "")
    for line in _text(system / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields, told = front.split(" "), back.split(" ")
        if len(fields) < 5 or len(told) < 2:
            continue
        point = Path(_unescaped(fields[4]))
        if place.is_relative_to(point) and len(point.parts) >= longest:  # the last of several at one place is on top
            longest, found = len(point.parts), (told[0], _unescaped(told[1]))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
