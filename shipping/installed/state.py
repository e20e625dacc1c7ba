"""`state.json`: what a device remembers about its model, its channels and its bundles.

An older channel is recognised by it, and a bundle that was rolled back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from moec.manifests.codec import DecodeError, canonical_json, from_plain, to_plain
from moec.manifests.errors import InputError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.output_file import WRITING_SUFFIX, AtomicFile, FileSystem
from moec.manifests.files.strict_json import load_strict_json

from ..channel import MAX_SEQUENCE, channel_path, decode_moment
from .places import Places, bundle_id

STATE_VERSION = 1
STATE_JSON = JsonLimits(1 << 20, containers=1 << 12, values=1 << 14, texts=1 << 15, depth=4)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ChannelState:
    """A channel that was pulled from.

    highest_sequence: the highest one that was seen. A lower one is refused.
    rolled_back_sequence: sequences up to this one are not installed again; 0: none was rolled back.
    """

    channel: str
    highest_sequence: int
    rolled_back_sequence: int

    def __post_init__(self) -> None:
        channel_path(self.channel)
        if not 0 <= self.rolled_back_sequence <= self.highest_sequence <= MAX_SEQUENCE:
            raise ValueError(f"sequences out of range: {self.rolled_back_sequence}, {self.highest_sequence}")


@dataclass(frozen=True, slots=True)
class BundleState:
    """A bundle that was installed.

    device: name of the profile that it is for.
    channel, sequence: where it comes from. If later sequences name it too, the highest one.
    installed: moment of the switch to it, in UTC.
    """

    manifest_sha256: str
    device: str
    channel: str
    sequence: int
    installed: str

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.manifest_sha256):
            raise ValueError(f"manifest_sha256: expected 64 hex digits, found `{self.manifest_sha256[:80]}`")
        channel_path(self.channel)
        decode_moment(self.installed)
        if not 1 <= self.sequence <= MAX_SEQUENCE:
            raise ValueError(f"sequence out of range: {self.sequence}")

    @property
    def name(self) -> str:
        return bundle_id(self.manifest_sha256)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The whole state.

    model: name of the model; one folder has bundles of one model.
    bundles: in the order of installation; a bundle that was rolled back comes first.
    """

    version: int
    model: str
    channels: tuple[ChannelState, ...] = ()
    bundles: tuple[BundleState, ...] = ()

    def __post_init__(self) -> None:
        if self.version != STATE_VERSION:
            raise ValueError(f"version: expected {STATE_VERSION}, found {self.version}")
        if len({item.channel for item in self.channels}) != len(self.channels):
            raise ValueError("channels: a name occurs twice")
        if len({item.name for item in self.bundles}) != len(self.bundles):
            raise ValueError("bundles: a bundle occurs twice")

    def channel(self, name: str) -> ChannelState:
        return next((item for item in self.channels if item.channel == name), ChannelState(name, 0, 0))

    def bundle(self, name: str) -> BundleState | None:
        return next((item for item in self.bundles if item.name == name), None)

    def with_channel(self, changed: ChannelState) -> DeviceState:
        others = tuple(item for item in self.channels if item.channel != changed.channel)
        return replace(self, channels=(*others, changed))

    def with_bundle(self, installed: BundleState) -> DeviceState:
        """Return the state with a bundle as the last one that was installed."""
        others = tuple(item for item in self.bundles if item.name != installed.name)
        return replace(self, bundles=(*others, installed))

    def with_first_bundle(self, left: BundleState) -> DeviceState:
        """Return the state with a bundle as the last one to return to."""
        return replace(self, bundles=(left, *(item for item in self.bundles if item.name != left.name)))

    def without_bundles(self, names: set[str]) -> DeviceState:
        return replace(self, bundles=tuple(item for item in self.bundles if item.name not in names))


def read_state(places: Places) -> DeviceState | None:
    """Return the state of a device, or None if nothing was pulled yet. Raises InputError."""
    try:
        data = read_input(places.state, STATE_JSON.size_bytes)
    except UnreadableFile as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return None
        raise InputError(f"`{places.state}` {error}", "restore it from a backup") from error
    try:
        return from_plain(DeviceState, load_strict_json(data, STATE_JSON))  # type: ignore[no-any-return]
    except (DecodeError, ValueError) as error:
        raise InputError(
            f"`{places.state}` is damaged: {error}",
            "restore it, or pull into another folder: an old channel is recognised by it",
        ) from error


def write_state(places: Places, state: DeviceState, system: FileSystem) -> None:
    """Replace the state in one step. Raises OSError."""
    growing = places.state.with_name(f".{places.state.name}{WRITING_SUFFIX}")
    with AtomicFile(places.state, growing, system) as file:
        file.write(canonical_json(to_plain(state)))
