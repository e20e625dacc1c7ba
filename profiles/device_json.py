"""`device.json`: the whole profile of the device that a bundle was compiled for.

Its form is strict JSON, because a run reads it at each start and TOML takes longer to import.
Source: docs/format.md, Device.
"""

from __future__ import annotations

from moec.manifests.codec import canonical_json
from moec.manifests.errors import ManifestInvalid, ProfileError, UnknownFormatVersion
from moec.manifests.files.limits import DEVICE_JSON
from moec.manifests.files.strict_json import load_strict_json, shown

from .device import DeviceProfile
from .plain_profile import profile_from_plain, profile_to_plain

FORMAT_VERSION = 1
_COPY_AGAIN = "copy the bundle again, or compile it again"


def encode_device(profile: DeviceProfile) -> bytes:
    """Return the bytes of `device.json`. Equal profiles give equal bytes."""
    return canonical_json({"format_version": FORMAT_VERSION, **profile_to_plain(profile)})


def decode_device(data: bytes, place: str) -> DeviceProfile:
    """Return the profile of a `device.json`.

    place: the file, for messages.
    Raises ManifestInvalid with place, key, expected and found value. Raises UnknownFormatVersion.
    """
    try:
        plain = load_strict_json(data, DEVICE_JSON)
    except ValueError as error:
        raise ManifestInvalid(f"`{place}` is not strict JSON: {error}", _COPY_AGAIN) from error
    if not isinstance(plain, dict):
        raise ManifestInvalid(f"`{place}`: expected an object, found {shown(plain)}", _COPY_AGAIN)
    version = plain.pop("format_version", None)
    if type(version) is not int:
        raise ManifestInvalid(f"`{place}`: `format_version`: expected a number, found {shown(version)}", _COPY_AGAIN)
    if version != FORMAT_VERSION:
        raise UnknownFormatVersion(
            f"`{place}` has format version {shown(version)}, this moec reads {FORMAT_VERSION}", "install a newer moec"
        )
    try:
        profile = profile_from_plain(plain, place)
        is_canonical = encode_device(profile) == data
    except ProfileError as error:
        raise ManifestInvalid(error.message, _COPY_AGAIN) from error
    except UnicodeEncodeError as error:
        raise ManifestInvalid(f"`{place}`: half of a surrogate pair is no text", _COPY_AGAIN) from error
    if not is_canonical:
        raise ManifestInvalid(f"`{place}` is not in the form that `moec compile` writes", _COPY_AGAIN)
    return profile
