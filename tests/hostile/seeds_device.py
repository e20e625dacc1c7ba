"""Seeds of `device.json`, the profile in a bundle for a named device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.bundle import DEVICE_NAME, QUALITY_NAME
from moec.manifests.files.limits import MAX_DEVICE_BYTES
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import encode_device
from moec.profiles.loading import load_profile
from moec.profiles.probe import allowed_processors
from moec.profiles.processor import instruction_sets
from tests.gates.damage import edit_manifest
from tests.hostile.seed import Seed

DONE, ACT, DAMAGED = frozenset({0}), frozenset({1}), frozenset({3})
RUN = ("run", "{bundle}", "--prompt", "Question: a", "--max-new-tokens", "3")


def write_device(bundle: Path, profile: DeviceProfile) -> None:
    """Give a bundle the profile of a device, as a compile for it does."""

    def name_it(plain: dict[str, Any]) -> None:
        plain["device"].update(profile=profile.name, profile_sha256=profile.sha256)

    (bundle / DEVICE_NAME).write_bytes(encode_device(profile))
    edit_manifest(bundle, name_it)


def _device(profile: DeviceProfile) -> Callable[[Path], None]:
    return lambda bundle: write_device(bundle, profile)


def _edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Write a profile, and change its values without its digest."""

    def change(bundle: Path) -> None:
        write_device(bundle, load_profile("laptop"))
        plain = json.loads((bundle / DEVICE_NAME).read_bytes())
        edit(plain)
        (bundle / DEVICE_NAME).write_bytes((json.dumps(plain, indent=1) + "\n").encode())

    return change


def _of_bytes(data: bytes) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        write_device(bundle, load_profile("laptop"))
        (bundle / DEVICE_NAME).write_bytes(data)

    return change


def _pipe(bundle: Path) -> None:
    write_device(bundle, load_profile("laptop"))
    (bundle / DEVICE_NAME).unlink()
    os.mkfifo(bundle / DEVICE_NAME)


def _link(bundle: Path) -> None:
    (bundle / DEVICE_NAME).symlink_to(bundle / QUALITY_NAME)


def _board(**changes: Any) -> DeviceProfile:
    """A device like this machine."""
    laptop = load_profile("laptop")
    return replace(laptop, threads=len(allowed_processors()), instruction_sets=instruction_sets(), **changes)


SEEDS: tuple[Seed, ...] = (
    Seed("a profile of another machine", RUN, DONE, _device(load_profile("jetson-tx2-hdd"))),
    Seed("a profile that is verified", ("verify", "{bundle}"), DONE, _device(load_profile("jetson-tx2-hdd"))),
    Seed("a profile of this machine with a budget of a byte", RUN, ACT, _device(_board(memory_budget_bytes=1))),
    Seed("a profile of this machine, memory given", (*RUN, "--memory", "1GB"), DONE, _device(_board())),
    Seed("an empty profile", RUN, DAMAGED, _of_bytes(b"")),
    Seed("a profile of lists", RUN, DAMAGED, _of_bytes(b"[" * 100_000)),
    Seed("a profile that is too large", RUN, DAMAGED, _of_bytes(b" " * (MAX_DEVICE_BYTES + 1))),
    Seed("a profile of another device than the manifest names", RUN, DAMAGED, _edited(lambda p: p.update(threads=9))),
    Seed("such a profile, verified", ("verify", "{bundle}"), DAMAGED, _edited(lambda p: p.update(threads=9))),
    Seed("such a profile, inspected", ("inspect", "{bundle}"), DAMAGED, _edited(lambda p: p.update(threads=9))),
    Seed("a profile with control characters", RUN, DAMAGED, _edited(lambda p: p.update(name="x\x1b]0;owned\x07"))),
    Seed("a profile with an unknown key", RUN, DAMAGED, _edited(lambda p: p.update({"x\x1b": 1}))),
    Seed("a profile of a later version", RUN, DAMAGED, _edited(lambda p: p.update(format_version=10**9))),
    Seed("a profile that the manifest does not list", RUN, DAMAGED, _device(load_profile("laptop")), seal=False),
    Seed("a pipe as the profile", RUN, DAMAGED, _pipe),
    Seed("a link as the profile", RUN, DAMAGED, _link),
)
