"""Load a device profile: a shipped one by name, a TOML file, or `host`, which probes this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from moec.manifests.errors import ProfileError

from .device import CONTENT, HOST_NAME, NUMBERS, DeviceProfile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

MAX_PROFILE_BYTES = 64 << 10
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
    expected = {"name", *CONTENT, "provenance"}
    unknown, missing = sorted(set(plain) - expected), sorted(expected - set(plain))
    if unknown:
        raise ProfileError(f"`{path}`: unknown key `{unknown[0]}`", f"expected {', '.join(sorted(expected))}")
    if missing:
        raise ProfileError(
            f"`{path}`: missing key `{missing[0]}`", "every profile states all keys; see the shipped ones"
        )
    for key in NUMBERS:
        if type(plain[key]) is not int:
            raise _wrong_type(path, key, "a whole number", plain[key])
    if type(plain["name"]) is not str:
        raise _wrong_type(path, "name", "a text", plain["name"])
    sets = plain["instruction_sets"]
    if not isinstance(sets, list) or not all(type(name) is str for name in sets):
        raise _wrong_type(path, "instruction_sets", "a list of texts", sets)
    provenance = plain["provenance"]
    if not isinstance(provenance, dict) or not all(type(text) is str for text in provenance.values()):
        raise _wrong_type(path, "provenance", "a table of texts", provenance)
    if plain["name"] == HOST_NAME:
        raise ProfileError(f"`{path}`: `name`: `{HOST_NAME}` is the probed profile", "choose another name")
    try:
        return DeviceProfile(**{**plain, "instruction_sets": tuple(sets)})
    except ValueError as error:
        raise ProfileError(f"`{path}`: {error}", "correct this key") from error


def to_toml(profile: DeviceProfile) -> str:
    """Return the profile as text that `read_profile` accepts."""
    lines = [f"name = {json.dumps(profile.name)}"]
    lines += [f"{key} = {getattr(profile, key):_}" for key in NUMBERS]
    lines += [f"instruction_sets = {json.dumps(list(profile.instruction_sets))}", "", "[provenance]"]
    lines += [f"{key} = {json.dumps(profile.provenance[key], ensure_ascii=False)}" for key in CONTENT]
    return "\n".join(lines) + "\n"


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
