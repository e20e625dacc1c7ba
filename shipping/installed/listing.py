"""Bundles in the folder of a device, as values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moec.manifests.errors import InputError

from .places import Places, check_device_folder
from .receipt import difference, read_receipt
from .state import DeviceState, read_state


def installed_bundles(folder: Path) -> tuple[DeviceState, list[dict[str, Any]]]:
    """Return the state of a device and its bundles, the current one first, then the latest ones.

    Nothing is changed, and no weight is read. A bundle has the fields of `moec installed --json`. Its device, channel,
    sequence and moment are empty if its pull has not switched to it. `changed` says what changed since its receipt, or
    is None.
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
    bundles = []
    for name in names:
        known, receipt, path = state.bundle(name), read_receipt(places.receipt(name)), places.bundle(name)
        bundles.append({
            "bundle": name,
            "path": str(path),
            "current": name == current,
            "previous": name == places.previous,
            "device": known.device if known else "",
            "channel": known.channel if known else "",
            "sequence": known.sequence if known else 0,
            "installed": known.installed if known else "",
            "bytes": receipt.size_bytes if receipt else sum(file.lstat().st_size for file in path.iterdir()),
            "changed": difference(path, receipt),
        })  # fmt: skip
    return state, bundles
