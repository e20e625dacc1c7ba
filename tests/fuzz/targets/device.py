"""`device.json` of a bundle. What is accepted is written again byte for byte."""

from __future__ import annotations

from moec.manifests.errors import BundleError
from moec.profiles.device_json import decode_device, encode_device
from moec.profiles.loading import load_profile


def target(data: bytes) -> None:
    try:
        profile = decode_device(data, "device.json")
    except BundleError:
        return
    if encode_device(profile) != data:
        raise AssertionError("an accepted profile is written in another way")


def seeds() -> list[bytes]:
    return [encode_device(load_profile(name)) for name in ("laptop", "jetson-tx2-hdd", "xiaomi-14")]
