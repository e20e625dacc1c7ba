"""Identify the storage of a file by what the system reports. The result is the same after a restart or a new mount."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from moec.manifests.files.mounts import mount_of

from .processor import read_text

_SYSTEM = Path("/")
# Files of a block device in /sys that identify it; each driver has some of them. Names and numbers of devices are left
# out, because both may change with a restart.
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
# Files of a device that is made of other devices: encryption, volumes, arrays.
_MAPPING_FACTS = ("dm/uuid", "md/level")


def storage_sha256(place: Path, system: Path = _SYSTEM) -> str:
    """Return a digest of the storage of an existing file or folder: its disks and the type of its file system.

    If the system reports no disk (network, memory, containers), the type and the source of the mount are used.
    Two disks of one model have different digests if they report a serial number.
    system: root folder of /proc and /sys.
    Raises OSError.
    """
    device = place.stat().st_dev
    mount = mount_of(place.resolve(), system)
    blocks = [system / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"]
    if mount.source.startswith("/dev/"):  # some file systems, such as btrfs, number their devices themselves
        blocks.append(system / "sys/class/block" / (system / mount.source.lstrip("/")).resolve().name)
    facts = next((disks for block in blocks if any(disks := _disks(block))), mount.source)
    return hashlib.sha256(json.dumps([mount.kind, facts]).encode()).hexdigest()


def _disks(block: Path) -> list[list[str]]:
    """Return the facts of a block device in /sys and of the disks below it, sorted; empty if it is missing."""
    block = block.resolve()
    if not block.is_dir():
        return []
    if (block / "partition").exists():
        block = block.parent
    below = sorted(disk for slave in (block / "slaves").glob("*") for disk in _disks(slave))
    names = _MAPPING_FACTS if below else _DISK_FACTS
    return [[f"{name} {text}" for name in names if (text := read_text(block / name).strip())], *below]
