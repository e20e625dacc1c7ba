"""List the bundles in the folder of a device, and return to the previous one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.errors import InputError
from moec.manifests.files.output_file import FileSystem, write_errors

from .places import CURRENT, PREVIOUS, Places, check_device_folder, locked, remove_previous, set_link
from .prune import kept_names, tidy
from .receipt import difference, read_receipt, recheck
from .state import DeviceState, read_state, write_state


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


def roll_back(folder: Path, check: Callable[[Path], object]) -> dict[str, Any]:
    """Switch to the previous bundle. The one that is left stays on disk until the next pull.

    check: opens a bundle and runs its self-test; it raises an error if the bundle must not be used.
    Returns the fields of `moec rollback --json`. What `channel` and `sequence` name is not pulled again.
    Raises InputError if there is no previous bundle, or if its files changed. Raises the errors of `check`.
    """
    places, system = Places(folder), FileSystem()
    if not folder.is_dir():
        raise InputError(f"`{folder}` is no folder of installed bundles", "name the folder that `moec pull` made")
    check_device_folder(folder)
    if read_state(places) is None:
        raise _nothing_to_return_to(folder)
    with write_errors(folder), locked(places):
        tidy(places, system)
        state, current, target = read_state(places), places.current, places.previous
        if state is None or current is None or target is None:
            raise _nothing_to_return_to(folder)
        changed = recheck(places, target, system)
        if changed is not None:
            raise InputError(f"`{places.bundle(target)}` cannot be used: {changed}", "pull a bundle again")
        check(places.bundle(target))
        left = state.bundle(current)
        if left is None:
            raise InputError(f"`{places.state}` does not list the current bundle `{current}`", "pull a bundle again")
        channel = state.channel(left.channel)
        sequence = max(left.sequence, channel.rolled_back_sequence)
        highest = max(sequence, channel.highest_sequence)
        state = state.with_channel(replace(channel, rolled_back_sequence=sequence, highest_sequence=highest))
        state = state.with_first_bundle(left)
        write_state(places, state, system)
        older = [name for name in kept_names(places, state, len(state.bundles)) if name not in (current, target)]
        set_link(places, CURRENT, target, system)
        if older:
            set_link(places, PREVIOUS, older[0], system)
        else:
            remove_previous(places, system)
    return {"left": current, "current": target, "channel": left.channel, "sequence": sequence}


def _nothing_to_return_to(folder: Path) -> InputError:
    return InputError(f"`{folder}` has no previous bundle to return to", "see what it has: moec installed DIR")
