"""Device profiles, TOML. What is accepted is written in a form that is read as the same profile."""

from __future__ import annotations

from pathlib import Path

import moec.profiles.device as device
from moec.manifests.errors import ProfileError
from moec.profiles.loading import read_profile, to_toml
from tests.fuzz.targets.scratch import file_of


def target(data: bytes) -> None:
    try:
        profile = read_profile(file_of("a.toml", data))
    except ProfileError:
        return
    if read_profile(file_of("again.toml", to_toml(profile).encode())) != profile:
        raise AssertionError("an accepted profile changes when it is written")


def seeds() -> list[bytes]:
    folder = Path(device.__file__).parent
    return [(folder / f"{name}.toml").read_bytes() for name in ("laptop", "quadro-rtx-6000-host", "xiaomi-14")]
