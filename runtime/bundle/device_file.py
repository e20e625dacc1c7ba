"""The profile in a bundle for a named device: read before the manifest at a start, and checked against it later."""

from __future__ import annotations

import os
from pathlib import Path

from moec.manifests.bundle import DEVICE_NAME
from moec.manifests.errors import ManifestInvalid
from moec.manifests.files.limits import MAX_DEVICE_BYTES
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import decode_device

from .files import BundleFiles
from .open_bundle import Bundle


def stated_device(folder: Path) -> DeviceProfile | None:
    """Return the profile in the folder of a bundle, or None. The manifest is not read, which takes longer.

    `device_of` compares it with the manifest when the bundle is open.
    Raises BundleError, StorageReadFailed.
    """
    if not os.path.lexists(folder / DEVICE_NAME):
        return None
    files = BundleFiles(folder)
    files.open([DEVICE_NAME])
    return decode_device(files[DEVICE_NAME].read(MAX_DEVICE_BYTES), str(folder / DEVICE_NAME))


def device_of(bundle: Bundle, *, verify: bool = True) -> DeviceProfile | None:
    """Return the profile that the manifest of a bundle lists, or None if it lists none.

    verify: whether to compare the file with its digest.
    Raises BundleError, also for the profile of another device than the manifest names. Raises StorageReadFailed.
    """
    if not bundle.has_file(DEVICE_NAME):
        return None
    place, device = bundle.path / DEVICE_NAME, bundle.manifest.device
    profile = decode_device(bundle.read_file(DEVICE_NAME, MAX_DEVICE_BYTES, verify=verify), str(place))
    if (profile.name, profile.sha256) != (device.profile, device.profile_sha256):
        raise ManifestInvalid(
            f"`{place}`: expected the device `{device.profile[:80]}` of the manifest with the digest "
            f"{device.profile_sha256[:12]}, found `{profile.name}` with {profile.sha256[:12]}",
            "compile the bundle again",
        )
    return profile
