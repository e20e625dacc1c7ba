"""`device.json`, the whole profile of a bundle's device, and the plain values of any profile. Every key is checked.

Its form is strict JSON, because a run reads it at each start and TOML takes longer to import.
Source: docs/format.md, Device.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from moec.manifests.codec import canonical_json
from moec.manifests.errors import ManifestInvalid, ProfileError, UnknownFormatVersion
from moec.manifests.files.limits import DEVICE_JSON
from moec.manifests.files.strict_json import load_strict_json, shown

from .device import CONTENT, HOST_NAME, MEASURED, NUMBERS, DeviceProfile
from .device_parts import PARTS, Part

FORMAT_VERSION = 1
_COPY_AGAIN = "copy the bundle again, or compile it again"
_TEXTS, _WHOLES, _WATTS = ("type", "io"), ("little_cpus",), ("load_watts", "idle_watts", "gpu_watts")
"""Keys of parts that are a text, a list of whole numbers or a number. All others are whole numbers."""


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


def profile_from_plain(plain: dict[str, Any], place: str) -> DeviceProfile:
    """Return the profile of plain values. Raises ProfileError with place, key and remedy.

    place: the file that they come from.
    """
    optional = {kind.TABLE for kind in PARTS}
    _check_keys(place, plain, {"name", *CONTENT, "provenance"}, optional)
    for key in NUMBERS:
        if type(plain[key]) is not int:
            raise _wrong_type(place, key, "a whole number", plain[key])
    if type(plain["name"]) is not str:
        raise _wrong_type(place, "name", "a text", plain["name"])
    sets = plain["instruction_sets"]
    if not isinstance(sets, list) or not all(type(name) is str for name in sets):
        raise _wrong_type(place, "instruction_sets", "a list of texts", sets)
    if plain["name"] == HOST_NAME:
        raise ProfileError(f"`{place}`: `name`: `{HOST_NAME}` is the probed profile", "choose another name")
    try:
        parts = {kind.TABLE: _read_part(place, kind, plain[kind.TABLE]) for kind in PARTS if kind.TABLE in plain}
        provenance = _read_provenance(place, plain["provenance"])
        profile = DeviceProfile(**{**plain, **parts, "provenance": provenance, "instruction_sets": tuple(sets)})
    except ValueError as error:
        raise ProfileError(f"`{place}`: {error}", "correct this key") from error
    # Refuse storage that is faster than the memory that it is read into. A probe copies memory with one thread, and
    # reads files with two, so a file in memory can be faster by its figures.
    storage, memory = profile.storage_bytes_per_s, profile.memory_bytes_per_s
    if storage > memory and not profile.provenance["storage_bytes_per_s"].startswith(MEASURED):
        raise ProfileError(
            f"`{place}`: `storage_bytes_per_s`: expected at most the {memory} of `memory_bytes_per_s`, found {storage}",
            "correct one of both; both count bytes",
        )
    return profile


def profile_to_plain(profile: DeviceProfile) -> dict[str, Any]:
    """Return the values that `profile_from_plain` reads as the same profile, and no others."""
    plain = {key: getattr(profile, key) for key in ("name", *CONTENT)}
    plain |= {table.TABLE: table.stated() for table in profile.parts()}
    return {**plain, "provenance": {key: profile.provenance[key] for key in profile.stated_keys()}}


def _check_keys(place: str, plain: dict[str, Any], needed: set[str], optional: set[str], table: str = "") -> None:
    """Refuse unknown and missing keys. table: name of the table with a dot; empty: the file itself."""
    unknown, missing = sorted(set(plain) - needed - optional), sorted(needed - set(plain))
    if unknown:
        expected = ", ".join(sorted(needed | optional))
        raise ProfileError(f"`{place}`: unknown key `{table}{unknown[0][:80]}`", f"expected {expected}")
    if missing:
        whole = f"every table `{table[:-1]}`" if table else "every profile"
        raise ProfileError(f"`{place}`: missing key `{table}{missing[0]}`", f"{whole} states it; see the shipped ones")


def _read_part(place: str, kind: type[Part], plain: Any) -> Part:
    """Return a part of a profile. Raises ProfileError on a wrong key or type, ValueError on a wrong value."""
    if not isinstance(plain, dict):
        raise _wrong_type(place, kind.TABLE, "a table", plain)
    needed = {item.name for item in fields(kind) if item.default is MISSING}
    _check_keys(place, plain, needed, {item.name for item in fields(kind)} - needed, f"{kind.TABLE}.")
    values: dict[str, Any] = {}
    for key, value in plain.items():
        full = f"{kind.TABLE}.{key}"
        if key in _TEXTS and type(value) is not str:
            raise _wrong_type(place, full, "a text", value)
        if key in _WHOLES and not (isinstance(value, list) and all(type(number) is int for number in value)):
            raise _wrong_type(place, full, "a list of whole numbers", value)
        if key in _WATTS and type(value) not in (int, float):
            raise _wrong_type(place, full, "a number", value)
        if key not in (*_TEXTS, *_WHOLES, *_WATTS) and type(value) is not int:
            raise _wrong_type(place, full, "a whole number", value)
        values[key] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _read_provenance(place: str, plain: Any) -> dict[str, str]:
    """Return the sources by key. A key of a part, `gpu.type = "..."`, is a table of its own in TOML."""
    sources: dict[str, str] = {}
    for key, value in plain.items() if isinstance(plain, dict) else [("", plain)]:
        inner = {f"{key}.{name}": text for name, text in value.items()} if isinstance(value, dict) else {key: value}
        sources |= inner
    if not isinstance(plain, dict) or not all(type(text) is str for text in sources.values()):
        raise _wrong_type(place, "provenance", "a table of texts", plain)
    return sources


def _wrong_type(place: str, key: str, expected: str, value: object) -> ProfileError:
    return ProfileError(f"`{place}`: `{key}`: expected {expected}, found {str(value)[:60]!r}", "correct this key")
