"""Remove bundles that are no longer kept. An engine that runs one keeps its open files."""

from __future__ import annotations

import os
import shutil
import stat

from moec.manifests.bundle import PARTIAL_SUFFIX
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.output_file import WRITING_SUFFIX, FileSystem

from .places import JOURNAL_SUFFIX, REMOVING_SUFFIX, Places, is_own_name, remove_previous
from .state import DeviceState, write_state

_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


def kept_names(places: Places, state: DeviceState, keep: int) -> list[str]:
    """Return the current bundle, then the previous one and the others that were installed last.

    keep: number of bundles in addition to the current one.
    """
    current, previous = places.current, places.previous
    installed = set(places.ids())
    latest = [item.name for item in reversed(state.bundles) if item.name in installed]
    others = [name for name in dict.fromkeys([previous, *latest]) if name is not None and name != current]
    return [*([current] if current else []), *others[:keep]]


def prune(places: Places, state: DeviceState, keep: int, system: FileSystem, spared: str | None = None) -> DeviceState:
    """Remove all bundles but those of `kept_names`. Return the state without them.

    spared: one more bundle that stays.
    Raises OSError.
    """
    staying = {*kept_names(places, state, keep), *([spared] if spared else [])}
    gone = sorted(set(places.ids()) - staying)
    if places.previous is not None and places.previous not in staying:
        remove_previous(places, system)
    left = state.without_bundles({item.name for item in state.bundles} - staying)
    if left != state:
        write_state(places, left, system)
    for name in gone:
        system.rename(places.bundle(name), places.removing(name))
    finish_removals(places)
    for name in gone:
        remove_companions(places, name, system)
    return left


def make_room(
    places: Places, state: DeviceState, keep: int, missing_bytes: int, system: FileSystem, spared: str
) -> bool:
    """Remove the bundles that a switch to a new one would remove, if that frees enough. Return whether it was done.

    keep: number of bundles in addition to the current one, after the switch.
    missing_bytes: bytes of the disk that the new bundle lacks.
    spared: name of the new bundle.
    Raises OSError.
    """
    replaced = kept_names(places, state, keep)[keep:] if keep > 0 else []
    if not replaced or sum(_own_bytes(places, name) for name in replaced) < missing_bytes:
        return False
    prune(places, state, keep - 1, system, spared)
    return True


def _own_bytes(places: Places, name: str) -> int:
    """Return the bytes on the disk that only this bundle holds. Raises OSError."""
    files = [path.lstat() for path in places.bundle(name).iterdir()]
    return sum(file.st_blocks * _BLOCK_BYTES for file in files if file.st_nlink == 1)


def finish_removals(places: Places) -> None:
    """Remove the bundles that a `prune` has begun to remove. Raises OSError."""
    for name in _own_names(places, REMOVING_SUFFIX):
        shutil.rmtree(places.folder / name)


def tidy(places: Places, system: FileSystem) -> None:
    """Remove what killed processes left, except for a pull that can go on. The caller has the lock.

    Raises OSError.
    """
    finish_removals(places)
    for name in _own_names(places, WRITING_SUFFIX):
        system.remove(places.folder / name)
    for name in _own_names(places, JOURNAL_SUFFIX):
        if not is_implied_folder(places.partial(name.removesuffix(JOURNAL_SUFFIX))):
            system.remove(places.folder / name)


def remove_companions(places: Places, name: str, system: FileSystem) -> None:
    """Remove the files next to a bundle that is gone: signature, receipt, journal, tuning. Raises OSError."""
    for companion in os.listdir(places.folder):
        path = places.folder / companion
        if companion.startswith((f"{name}.", f".{name}.")) and not stat.S_ISDIR(path.lstat().st_mode):
            system.remove(path)


def remove_partial(places: Places, name: str, system: FileSystem) -> None:
    """Remove a pull that will not be finished. Raises OSError."""
    partial = places.partial(name)
    if is_implied_folder(partial):
        system.rename(partial, places.removing(name))
        shutil.rmtree(places.removing(name))
    if not is_implied_folder(places.bundle(name)):
        remove_companions(places, name, system)


def partial_names(places: Places) -> list[str]:
    """Return the bundles whose pull is not complete. Raises OSError."""
    return [name.removesuffix(PARTIAL_SUFFIX) for name in _own_names(places, PARTIAL_SUFFIX)]


def _own_names(places: Places, suffix: str) -> list[str]:
    """Return the names with a suffix, without those that others have put there. Raises OSError."""
    return [name for name in os.listdir(places.folder) if name.endswith(suffix) and is_own_name(name)]
