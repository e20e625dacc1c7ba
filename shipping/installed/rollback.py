"""Return to the previous bundle, and remember the sequence that was left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moec.manifests.errors import InputError
from moec.manifests.files.output_file import FileSystem, write_errors

from .places import CURRENT, PREVIOUS, Places, check_device_folder, locked, remove_link, set_link
from .prune import kept_names, tidy
from .receipt import recheck
from .state import read_state, write_state


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Result of a rollback.

    left, current: names of the bundles before and after.
    channel, sequence: what is not pulled again until a higher sequence appears.
    """

    left: str
    current: str
    channel: str
    sequence: int


def roll_back(folder: Path, check: Callable[[Path], object], system: FileSystem | None = None) -> RolledBack:
    """Switch to the previous bundle. The one that is left stays on disk until the next pull.

    check: opens a bundle and runs its self-test; it raises an error if the bundle must not be used.
    Raises InputError if there is no previous bundle, or if its files changed. Raises the errors of `check`.
    """
    system = system or FileSystem()
    places = Places(folder)
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
            remove_link(places, PREVIOUS, system)
    return RolledBack(current, target, left.channel, sequence)


def _nothing_to_return_to(folder: Path) -> InputError:
    return InputError(f"`{folder}` has no previous bundle to return to", "see what it has: moec installed DIR")
