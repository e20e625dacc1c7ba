"""Load a device profile: a shipped one by name, a TOML file, or `host`, which probes this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moec.manifests.errors import ProfileError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_TOML_BYTES
from moec.manifests.files.strict_toml import load_strict_toml

from .device import CONTENT, HOST_NAME, DeviceProfile
from .device_json import profile_from_plain

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
    try:
        plain = load_strict_toml(read_input(path, MAX_TOML_BYTES, follow_links=True))
    except UnreadableFile as error:
        raise ProfileError(f"`{path}` {error}", "give a device profile, a TOML file") from error
    except ValueError as error:
        raise ProfileError(f"`{path}` is not TOML that can be read: {error}", "correct the file") from error
    return profile_from_plain(plain, str(path))


def to_toml(profile: DeviceProfile) -> str:
    """Return the profile as text that `read_profile` accepts."""
    lines = [f"name = {_toml(profile.name)}"]
    lines += [f"{key} = {_toml(getattr(profile, key))}" for key in CONTENT]
    for table in profile.parts():
        lines += ["", f"[{table.TABLE}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.stated().items()]
    lines += ["", "[provenance]"]
    lines += [f"{key} = {_toml(profile.provenance[key])}" for key in profile.stated_keys()]
    return "\n".join(lines) + "\n"


def _toml(value: str | float | tuple[Any, ...]) -> str:
    """Return a value as TOML. JSON is TOML here, but for the control character DEL, which TOML wants escaped."""
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
