"""Pulls that are killed at an operation of the disk. As a program: one killed process for every STEP-th operation.

python -m tests.shipping.killed_pull FOLDER STEP

It prints one JSON object per run: the operation, the exit code, which bundle was current, which one is after another
pull, and what that one left. The last run is not killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moec.manifests.files.output_file import FileSystem
from tests.shipping.devices import Device
from tests.shipping.model_bundles import digests, push, write_bundle
from tests.shipping.signing_keys import signing_key

KILLED = 9
OPERATIONS = ("open", "write", "sync", "rename", "link", "sync_directory", "make_directory", "remove")


class KillingSystem(FileSystem):
    """A file system whose process ends at once at an operation. A write is cut in half.

    at: number of that operation, from 1.
    note: descriptor that its name is written to.
    """

    def __init__(self, at: int, note: int) -> None:
        self._left, self._note = at, note

    def step(self, name: str, subject: Any, rest: tuple[Any, ...]) -> None:
        """Count an operation, and end if it is the one."""
        self._left -= 1
        if self._left:
            return
        os.write(self._note, name.encode())
        if name == "write":
            subject.write(memoryview(rest[0])[: len(rest[0]) // 2])
            subject.flush()
        os._exit(KILLED)


def _killing(name: str) -> Callable[..., Any]:
    plain = getattr(FileSystem, name)

    def operation(self: KillingSystem, subject: Any, *rest: Any) -> Any:
        self.step(name, subject, rest)
        return plain(self, subject, *rest)

    return operation


for _name in OPERATIONS:
    setattr(KillingSystem, _name, _killing(_name))


def scene(folder: Path) -> Device:
    """A device, and a store with two versions that have some experts and files in common."""
    for at in (0, 1):
        write_bundle(
            folder / f"v{at}", version=lambda layer, expert, at=at: at * (layer == 1 and expert != 2), note=str(at)
        )
    return Device(folder / "device", folder / "store", check=lambda bundle: None)


def main(folder: Path, step: int) -> None:
    """See the head of this file."""
    device, versions = (
        Device(folder / "device", folder / "store", check=lambda bundle: None),
        [
            folder / "v0",
            folder / "v1",
        ],
    )
    names = {
        json.dumps(digests(version), sort_keys=True): name
        for version, name in zip(versions, ("old", "new"), strict=True)
    }

    def current() -> str:
        return names.get(json.dumps(digests(device.folder / "current"), sort_keys=True), "neither")

    number, code = 1 - step, KILLED
    while code == KILLED:
        number += step
        shutil.rmtree(device.folder, ignore_errors=True)
        push(device.store, versions[0], signing_key(), 1)
        device.pull()
        push(device.store, versions[1], signing_key(), 2)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            device.pull(system=KillingSystem(number, writing), keep=0)
            os._exit(0)
        os.close(writing)
        operation = os.read(reading, 100).decode()
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = current()
        device.pull(keep=0)
        left = [name for name in device.names if "partial" in name or "journal" in name or "writing" in name]
        left += sorted(device.bundles - {os.readlink(device.folder / "current")})
        told = {"operation": operation, "code": code, "current": found, "after": current(), "left": left}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
