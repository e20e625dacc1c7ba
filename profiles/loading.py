"""Find a device profile: a shipped one by name, a TOML file, or `host`, which probes this machine."""

from __future__ import annotations

from pathlib import Path

from moec.manifests.errors import ProfileError

from .device import HOST_NAME, DeviceProfile, read_profile

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
