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
from ..installed.lock import locked
from ..installed.places import CURRENT, PREVIOUS, Places, bundle_id, check_device_folder, check_links, set_link
from ..installed.prune import make_room, prune, tidy
from ..installed.receipt import read_receipt
from ..installed.recheck import recheck
from ..installed.state import STATE_VERSION, BundleState, DeviceState, read_state, write_state
from ..signatures.keys import PublicKey
from ..store.interface import Store
from .choose import AUTO, check_version, choose_bundle
from .fetch import FetchOptions
from .installing import Installation, delta_of, install, plan_of
from .observer import PullObserver, PullPlan
from .partial_bundle import growing_manifest
from .remote_channel import check_channel, read_channel
from .remote_manifest import read_signed_manifest


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
    work = _Pull(store, keys, request, check, machine, observer or PullObserver(), system or FileSystem())
    return work.run()


@dataclass(frozen=True, slots=True)
class _Pull:
    store: Store
    keys: Sequence[PublicKey]
    request: PullRequest
    check: Callable[[Path], object]
    machine: Machine
    observer: PullObserver
    system: FileSystem

    @property
    def places(self) -> Places:
        return Places(self.request.folder)

    def run(self) -> Pulled:
        """Do all steps."""
        check_device_folder(self.request.folder)
        state = read_state(self.places)
        channel = read_channel(self.store, self.request.channel, self.keys, self.machine.now, self.observer.warning)
        check_channel(channel, state)
        check_version(channel, self.machine.version)
        bundle = choose_bundle(channel, self.request.device, self.request.memory_bytes, self.machine.system)
        name = bundle_id(bundle.manifest_sha256)
        result = Pulled(name, self.places.bundle(name), channel, bundle, "")
        self.observer.chosen(channel, bundle, result.name)
        if self.request.plan_only:
            return replace(result, outcome=self._plan(result))
        with write_errors(self.request.folder), made_folders(self.places.state, self.system), locked(self.places):
            state = read_state(self.places)  # another pull may have ended meanwhile
            check_channel(channel, state)
            return replace(result, outcome=self._work(result, state))

    def _plan(self, result: Pulled) -> str:
        """Tell the plan. Return the outcome."""
        if self._is_installed(result) and self.places.current == result.name:
            return "unchanged"
        if self._is_rolled_back(result, read_state(self.places)):
            return "rolled back"
        if self._is_installed(result):
            total = result.bundle.total_bytes - result.bundle.manifest_bytes
            self.observer.planned(PullPlan(total, 0, total, 0, 0))
        else:
            installation = self._installation(result)
            self.observer.planned(plan_of(installation, delta_of(installation)))
        return "planned"

    def _work(self, result: Pulled, state: DeviceState | None) -> str:
        """Install and switch. Return the outcome."""
        if self.places.current != result.name:
            check_links(self.places, self.system)
        tidy(self.places, self.system)
        channel = result.channel
        state = state or DeviceState(STATE_VERSION, channel.model)
        known = state.channel(channel.channel)
        if channel.sequence > known.highest_sequence:
            state = state.with_channel(replace(known, highest_sequence=channel.sequence))
            write_state(self.places, state, self.system)
        if self._is_rolled_back(result, state):
            return "rolled back"
        for name in self.places.ids():
            recheck(self.places, name, self.system)
        if not self._is_installed(result):
            state = prune(self.places, state, self.request.keep, self.system, spared=result.name)
            self._install(result, state)
            state = read_state(self.places) or state  # room may have been made
        elif self.places.current == result.name:
            state = self._note_installed(result, state)
            prune(self.places, state, self.request.keep, self.system)
            return "unchanged"
        self.observer.testing()
        self.check(result.path)
        self._switch(result, state)
        return "installed"

    def _install(self, result: Pulled, state: DeviceState) -> None:
        """Bring all bytes to their place. If the disk is short, what the switch would remove is removed before."""

        def make_room_for(missing_bytes: int) -> bool:
            return make_room(self.places, state, self.request.keep, missing_bytes, self.system, result.name)

        installation = self._installation(result)
        install(self.store, installation, self.request.fetch, self.observer, self.system, make_room_for)

    def _is_installed(self, result: Pulled) -> bool:
        """Return whether the bundle is there, and unchanged since it was checked."""
        receipt = read_receipt(self.places.receipt(result.name))
        if receipt is None or receipt.manifest_sha256 != result.bundle.manifest_sha256:
            return False
        if not is_implied_folder(result.path):
            return False
        return recheck(self.places, result.name, None if self.request.plan_only else self.system) is None

    def _is_rolled_back(self, result: Pulled, state: DeviceState | None) -> bool:
        channel = result.channel
        return state is not None and channel.sequence <= state.channel(channel.channel).rolled_back_sequence

    def _installation(self, result: Pulled) -> Installation:
        """Return the bundle with its verified manifest. Raises StoreFailed, BundleError, DeviceRefused."""
        kept = growing_manifest(self.places.partial(result.name))
        signed = read_signed_manifest(self.store, result.channel, result.bundle, self.keys, kept)
        return Installation(self.places, result.name, result.bundle.manifest_sha256, signed)

    def _note_installed(self, result: Pulled, state: DeviceState) -> DeviceState:
        """Remember the bundle with its sequence, unless that is known. Raises OSError."""
        known, channel = state.bundle(result.name), result.channel
        origin = (channel.channel, channel.sequence)
        if known is not None and (known.channel, known.sequence) == origin and self.places.current == result.name:
            return state
        installed = encode_moment(self.machine.now)
        if known is not None and self.places.current == result.name:
            installed = known.installed
        bundle = BundleState(result.bundle.manifest_sha256, result.bundle.device, *origin, installed)
        state = state.with_bundle(bundle)
        write_state(self.places, state, self.system)
        return state

    def _switch(self, result: Pulled, state: DeviceState) -> None:
        """Let `current` name the bundle, and remove what is not kept. Raises OSError."""
        state = self._note_installed(result, state)
        before = self.places.current
        if before is not None and before != result.name:
            set_link(self.places, PREVIOUS, before, self.system)
        set_link(self.places, CURRENT, result.name, self.system)
        prune(self.places, state, self.request.keep, self.system)
