"""Pull: bring the bundle that a channel names for this machine, and switch to it.

The order is that of docs/design/shipping.md, Pull. Until the last step, `current` names the old bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.output_file import FileSystem, made_folders, write_errors

from ..channel import DEFAULT_CHANNEL, Channel, ChannelBundle, encode_moment
from ..installed.places import CURRENT, PREVIOUS, Places, bundle_id, check_device_folder, check_links, locked, set_link
from ..installed.prune import make_room, prune, tidy
from ..installed.receipt import read_receipt, recheck
from ..installed.state import STATE_VERSION, BundleState, DeviceState, read_state, write_state
from ..signatures.keys import PublicKey
from ..store.interface import Store
from .choose import AUTO, check_channel, check_version, choose_bundle, read_channel, read_signed_manifest
from .delta import PullObserver, PullPlan
from .fetch import FetchOptions
from .installing import Installation, delta_of, install, plan_of
from .partial_bundle import growing_manifest


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Options of a pull.

    folder: the folder of the device; it may be missing.
    device: name of a device profile, or AUTO.
    memory_bytes: memory of a run; None: all memory of this machine.
    keep: bundles that stay in addition to the current one.
    plan_only: stop before anything is changed.
    """

    folder: Path
    channel: str = DEFAULT_CHANNEL
    device: str = AUTO
    memory_bytes: int | None = None
    keep: int = 1
    plan_only: bool = False
    fetch: FetchOptions = field(default_factory=FetchOptions)


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the present machine.

    version: version of this moec.
    now: moment in UTC.
    system: root folder of /proc and /sys.
    """

    version: str
    now: datetime
    system: Path = Path("/")


@dataclass(frozen=True, slots=True)
class Pulled:
    """Result of a pull.

    name: of the bundle's folder.
    outcome: "installed", "unchanged" (it was current already), "rolled back" (its sequence is not wanted) or "planned".
    """

    name: str
    path: Path
    channel: Channel
    bundle: ChannelBundle
    outcome: str


def pull(
    store: Store,
    keys: Sequence[PublicKey],
    request: PullRequest,
    check: Callable[[Path], object],
    machine: Machine,
    observer: PullObserver | None = None,
    system: FileSystem | None = None,
) -> Pulled:
    """Bring the folder of a device to what a channel names.

    keys: accepted keys.
    check: opens a bundle and runs its self-test; it raises an error if the bundle must not be used.
    Raises SignatureInvalid, ChannelRefused, ChecksumMismatch and other kinds of BundleError for what must not be
    installed. Raises DeviceRefused, DoesNotFit, StoreFailed, InputError, and the errors of `check`. After any error,
    `current` names the bundle that it named before.
    """
    places, observer, system = Places(request.folder), observer or PullObserver(), system or FileSystem()
    check_device_folder(request.folder)
    state = read_state(places)
    channel = read_channel(store, request.channel, keys, machine.now, observer.warning)
    check_channel(channel, state)
    check_version(channel, machine.version)
    bundle = choose_bundle(channel, request.device, request.memory_bytes, machine.system)
    name = bundle_id(bundle.manifest_sha256)
    observer.chosen(channel, bundle, name)
    work = _Pull(store, keys, request, machine.now, observer, system, places, channel, bundle, name)
    if request.plan_only:
        outcome = work.plan(state)
    else:
        with write_errors(request.folder), made_folders(places.state, system), locked(places):
            state = read_state(places)  # another pull may have ended meanwhile
            check_channel(channel, state)
            outcome = work.install(state, check)
    return Pulled(name, places.bundle(name), channel, bundle, outcome)


@dataclass(frozen=True, slots=True)
class _Pull:
    """The pull of one bundle of a channel. name: of the bundle's folder."""

    store: Store
    keys: Sequence[PublicKey]
    request: PullRequest
    now: datetime
    observer: PullObserver
    system: FileSystem
    places: Places
    channel: Channel
    bundle: ChannelBundle
    name: str

    def plan(self, state: DeviceState | None) -> str:
        """Tell the plan. Return the outcome."""
        is_installed = self._is_installed()
        if is_installed and self.places.current == self.name:
            return "unchanged"
        if self._is_rolled_back(state):
            return "rolled back"
        if is_installed:
            total = self.bundle.total_bytes - self.bundle.manifest_bytes
            self.observer.planned(PullPlan(total, 0, total, 0, 0))
        else:
            installation = self._installation()
            self.observer.planned(plan_of(installation, delta_of(installation)))
        return "planned"

    def install(self, state: DeviceState | None, check: Callable[[Path], object]) -> str:
        """Bring all bytes to their place and let `current` name the bundle. Return the outcome."""
        places, system, keep = self.places, self.system, self.request.keep
        if places.current != self.name:
            check_links(places, system)
        tidy(places, system)
        state = state or DeviceState(STATE_VERSION, self.channel.model)
        known = state.channel(self.channel.channel)
        if self.channel.sequence > known.highest_sequence:
            state = state.with_channel(replace(known, highest_sequence=self.channel.sequence))
            write_state(places, state, system)
        if self._is_rolled_back(state):
            return "rolled back"
        for name in places.ids():
            recheck(places, name, system)
        if not self._is_installed():
            state = prune(places, state, keep, system, spared=self.name)

            def make_room_for(missing_bytes: int, state: DeviceState = state) -> bool:
                return make_room(places, state, keep, missing_bytes, system, self.name)

            install(self.store, self._installation(), self.request.fetch, self.observer, system, make_room_for)
            state = read_state(places) or state  # room may have been made
        elif places.current == self.name:
            prune(places, self._note_installed(state), keep, system)
            return "unchanged"
        self.observer.testing()
        check(places.bundle(self.name))
        state = self._note_installed(state)
        before = places.current
        if before is not None and before != self.name:
            set_link(places, PREVIOUS, before, system)
        set_link(places, CURRENT, self.name, system)
        prune(places, state, keep, system)
        return "installed"

    def _is_installed(self) -> bool:
        receipt = read_receipt(self.places.receipt(self.name))
        if receipt is None or receipt.manifest_sha256 != self.bundle.manifest_sha256:
            return False
        if not is_implied_folder(self.places.bundle(self.name)):
            return False
        return recheck(self.places, self.name, None if self.request.plan_only else self.system) is None

    def _is_rolled_back(self, state: DeviceState | None) -> bool:
        rolled_back = 0 if state is None else state.channel(self.channel.channel).rolled_back_sequence
        return self.channel.sequence <= rolled_back

    def _installation(self) -> Installation:
        """Return the bundle with its verified manifest. Raises StoreFailed, BundleError, DeviceRefused."""
        left_manifest = growing_manifest(self.places.partial(self.name))
        signed = read_signed_manifest(self.store, self.channel, self.bundle, self.keys, left_manifest)
        return Installation(self.places, self.name, self.bundle.manifest_sha256, signed)

    def _note_installed(self, state: DeviceState) -> DeviceState:
        """Remember the bundle with its sequence, unless that is known. Raises OSError."""
        known, installed = state.bundle(self.name), encode_moment(self.now)
        origin = (self.channel.channel, self.channel.sequence)
        if known is not None and self.places.current == self.name:
            if (known.channel, known.sequence) == origin:
                return state
            installed = known.installed
        state = state.with_bundle(BundleState(self.bundle.manifest_sha256, self.bundle.device, *origin, installed))
        write_state(self.places, state, self.system)
        return state
