"""Bundles in the folder of a device, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moec.manifests.errors import InputError

from .places import Places, check_device_folder
from .receipt import difference, read_receipt
from .state import DeviceState, read_state


@dataclass(frozen=True, slots=True)
class InstalledBundle:
    """One installed bundle.

    device, channel, sequence, installed: empty and 0 for a bundle whose pull has not switched to it.
    size_bytes: size of its files. Files of equal content are on the disk once.
    changed: what changed since its receipt, in words, or None.
    """

    name: str
    path: Path
    device: str
    channel: str
    sequence: int
    installed: str
    size_bytes: int
    is_current: bool
    is_previous: bool
    changed: str | None


@dataclass(frozen=True, slots=True)
class Installed:
    """State of a device and its bundles, the current one first, then the latest ones."""

    state: DeviceState
    bundles: tuple[InstalledBundle, ...]


def installed_bundles(folder: Path) -> Installed:
    """Return what is installed in a folder. Nothing is changed, and no weight is read.

    Raises InputError if the folder is none of a device.
    """
    places = Places(folder)
    if not folder.is_dir():
        raise InputError(f"`{folder}` is no folder of installed bundles", "name the folder that `moec pull` made")
    check_device_folder(folder)
    state = read_state(places)
    if state is None:
        raise InputError(f"`{folder}` has no installed bundle", "pull one: moec pull SOURCE DIR --key FILE.pub")
    order = {item.name: at for at, item in enumerate(state.bundles)}
    current = places.current
    names = sorted(places.ids(), key=lambda name: (name != current, -order.get(name, -1), name))
    return Installed(state, tuple(_described(places, state, name) for name in names))


def _described(places: Places, state: DeviceState, name: str) -> InstalledBundle:
    known, receipt, folder = state.bundle(name), read_receipt(places.receipt(name)), places.bundle(name)
    size_bytes = sum(path.lstat().st_size for path in folder.iterdir()) if receipt is None else receipt.size_bytes
    return InstalledBundle(
        name=name,
        path=folder,
        device=known.device if known else "",
        channel=known.channel if known else "",
        sequence=known.sequence if known else 0,
        installed=known.installed if known else "",
        size_bytes=size_bytes,
        is_current=name == places.current,
        is_previous=name == places.previous,
        changed=difference(folder, receipt),
    )
