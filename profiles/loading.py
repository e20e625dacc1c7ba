"""Load a device profile: a shipped one by name, a TOML file, or `host`, which probes this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from moec.manifests.errors import ProfileError

from .device import CONTENT, HOST_NAME, MEASURED, NUMBERS, DeviceProfile
from .device_parts import PARTS, Cores, Gpu, Power

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

MAX_PROFILE_BYTES = 64 << 10
_TEXTS, _WHOLES, _WATTS = ("type",), ("little_cpus",), ("load_watts", "idle_watts", "gpu_watts")
"""Keys of parts that are a text, a list of whole numbers or a number. All others are whole numbers."""
_SHIPPED = Path(__file__).parent


def list_profiles() -> tuple[str, ...]:
    """Return the names that `--device` accepts: `host`, then the shipped profiles."""
    return (HOST_NAME, *sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def load_profile(name_or_path: str | Path, storage: Path | None = None) -> DeviceProfile:
    """Load a profile by name or TOML file. `host` probes this machine.

    storage: a file or folder on the device's disk, for `host`.
    Raises ProfileError with file, key and remedy.
    """
    text = str(name_or_path)
    if text == HOST_NAME:
        from .probe import probe_host  # imported only here, because a shipped profile needs no probe

        return probe_host(storage or Path.cwd())
    if text in list_profiles():
        return read_profile(_SHIPPED / f"{text}.toml")
    if text.endswith(".toml") or Path(text).is_file():
        return read_profile(Path(text))
    known = ", ".join(f"`{name}`" for name in list_profiles())
    raise ProfileError(f"no device profile is called `{text[:200]}`", f"use one of {known}, or a path to a .toml file")


def read_profile(path: Path) -> DeviceProfile:
    """Read one TOML file. Raises ProfileError with file, key and remedy."""
    plain = _read_toml(path)
    optional = {part.TABLE for part in PARTS}
    _check_keys(path, plain, {"name", *CONTENT, "provenance"}, optional)
    for key in NUMBERS:
        if type(plain[key]) is not int:
            raise _wrong_type(path, key, "a whole number", plain[key])
    if type(plain["name"]) is not str:
        raise _wrong_type(path, "name", "a text", plain["name"])
    sets = plain["instruction_sets"]
    if not isinstance(sets, list) or not all(type(name) is str for name in sets):
        raise _wrong_type(path, "instruction_sets", "a list of texts", sets)
    if plain["name"] == HOST_NAME:
        raise ProfileError(f"`{path}`: `name`: `{HOST_NAME}` is the probed profile", "choose another name")
    try:
        parts = {part.TABLE: _read_part(path, part, plain[part.TABLE]) for part in PARTS if part.TABLE in plain}
        provenance = _read_provenance(path, plain["provenance"])
        profile = DeviceProfile(**{**plain, **parts, "provenance": provenance, "instruction_sets": tuple(sets)})
    except ValueError as error:
        raise ProfileError(f"`{path}`: {error}", "correct this key") from error
    _check_rates(path, profile)
    return profile


def _check_rates(path: Path, profile: DeviceProfile) -> None:
    """Refuse storage that is faster than the memory that it is read into.

    A probe copies memory with one thread and reads files with two, so a file in memory can be faster by its figures.
    """
    storage, memory = profile.storage_bytes_per_s, profile.memory_bytes_per_s
    if storage > memory and not profile.provenance["storage_bytes_per_s"].startswith(MEASURED):
        raise ProfileError(
            f"`{path}`: `storage_bytes_per_s`: expected at most the {memory} of `memory_bytes_per_s`, found {storage}",
            "correct one of both; both count bytes",
        )


def _check_keys(path: Path, plain: dict[str, Any], needed: set[str], optional: set[str], table: str = "") -> None:
    """Refuse unknown and missing keys. table: name of the table with a dot; empty: the file itself."""
    unknown, missing = sorted(set(plain) - needed - optional), sorted(needed - set(plain))
    if unknown:
        expected = ", ".join(sorted(needed | optional))
        raise ProfileError(f"`{path}`: unknown key `{table}{unknown[0][:80]}`", f"expected {expected}")
    if missing:
        whole = f"every table `{table[:-1]}`" if table else "every profile"
        raise ProfileError(f"`{path}`: missing key `{table}{missing[0]}`", f"{whole} states it; see the shipped ones")


def _read_part(path: Path, part: type[Gpu] | type[Cores] | type[Power], plain: Any) -> Gpu | Cores | Power:
    """Return a part of a profile. Raises ProfileError on a wrong key or type, ValueError on a wrong value."""
    if not isinstance(plain, dict):
        raise _wrong_type(path, part.TABLE, "a table", plain)
    needed = {item.name for item in fields(part) if item.default is MISSING}
    _check_keys(path, plain, needed, {item.name for item in fields(part)} - needed, f"{part.TABLE}.")
    values: dict[str, Any] = {}
    for key, value in plain.items():
        place = f"{part.TABLE}.{key}"
        if key in _TEXTS and type(value) is not str:
            raise _wrong_type(path, place, "a text", value)
        if key in _WHOLES and not (isinstance(value, list) and all(type(each) is int for each in value)):
            raise _wrong_type(path, place, "a list of whole numbers", value)
        if key in _WATTS and type(value) not in (int, float):
            raise _wrong_type(path, place, "a number", value)
        if key not in (*_TEXTS, *_WHOLES, *_WATTS) and type(value) is not int:
            raise _wrong_type(path, place, "a whole number", value)
        values[key] = tuple(value) if isinstance(value, list) else value
    return part(**values)


def _read_provenance(path: Path, plain: Any) -> dict[str, str]:
    """Return the sources by key. A key of a part, `gpu.type = "..."`, is a table of its own in TOML."""
    found: dict[str, str] = {}
    for key, value in plain.items() if isinstance(plain, dict) else [("", plain)]:
        inner = {f"{key}.{name}": text for name, text in value.items()} if isinstance(value, dict) else {key: value}
        found |= inner
    if not isinstance(plain, dict) or not all(type(text) is str for text in found.values()):
        raise _wrong_type(path, "provenance", "a table of texts", plain)
    return found


def to_toml(profile: DeviceProfile) -> str:
    """Return the profile as text that `read_profile` accepts."""
    lines = [f"name = {_toml(profile.name)}"]
    lines += [f"{key} = {_toml(getattr(profile, key))}" for key in CONTENT]
    for part in profile.parts():
        lines += ["", f"[{part.TABLE}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in part.stated().items()]
    lines += ["", "[provenance]"]
    lines += [f"{key} = {_toml(profile.provenance[key])}" for key in profile.stated_keys()]
    return "\n".join(lines) + "\n"


def _toml(value: str | float | tuple[Any, ...]) -> str:
    """Return a value as TOML. JSON is TOML here, but for the control character DEL, which TOML wants escaped."""
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _wrong_type(path: Path, key: str, expected: str, found: object) -> ProfileError:
    return ProfileError(f"`{path}`: `{key}`: expected {expected}, found {str(found)[:60]!r}", "correct this key")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"`{path}` cannot be read: {error.strerror}", "check the path") from error
    if len(data) > MAX_PROFILE_BYTES:
        raise ProfileError(f"`{path}` has more than {MAX_PROFILE_BYTES} bytes", "is this a device profile?")
    try:
        plain: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"`{path}` is not TOML: {error}", "correct the file") from error
    return plain
