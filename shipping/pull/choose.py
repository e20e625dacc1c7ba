"""Read a channel, choose its bundle for the present machine, and read the manifest of the bundle.

Signatures are checked before anything is used. The choice goes by profile and memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moec.manifests.bundle import MANIFEST_NAME, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import (
    BundleError,
    ChannelRefused,
    ChecksumMismatch,
    DeviceRefused,
    SignatureInvalid,
    StoreFailed,
    UnknownFormatVersion,
)
from moec.manifests.sizes import limit_bytes, option_bytes
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import decode_device
from moec.profiles.probe import first_difference, memory_limit_bytes

from ..channel import (
    MAX_CHANNEL_BYTES,
    Channel,
    ChannelBundle,
    bundle_path,
    decode_moment,
    named_channel_path,
    signature_path,
    verify_channel,
    version_numbers,
)
from ..installed.state import DeviceState
from ..signatures.keys import PublicKey
from ..signatures.model_signature import MAX_SIGNATURE_BYTES, verify_signature
from ..store.interface import Store

AUTO = "auto"
_SYSTEM = Path("/")
_MOST_LISTED = 20
_PUSH_AGAIN = "push the bundle again"
_SEND_AGAIN = "send the files again: moec push BUNDLE DEST --again"


def choose_bundle(
    channel: Channel, device: str = AUTO, memory_bytes: int | None = None, system: Path = _SYSTEM
) -> ChannelBundle:
    """Return the bundle of a channel for this machine.

    device: name of a device profile; AUTO: the one that this machine is like, or else a bundle that states no profile.
    memory_bytes: memory of a run; None: all memory of this machine.
    system: root folder of /proc and /sys.
    Raises DeviceRefused with the devices that the channel has.
    """
    memory = memory_limit_bytes(system) if memory_bytes is None else memory_bytes
    if device != AUTO:
        named = [bundle for bundle in channel.bundles if bundle.device == device]
        reasons = {bundle.device: _lack_of_memory(bundle.memory_floor_bytes, memory) for bundle in named}
        if named and reasons[device] is None:
            return named[0]
        why = f": {reasons[device]}" if named else ""
        remedy = _remedy(named, reasons, memory_bytes)
        raise _refused(channel, f"has no bundle for the device `{device[:80]}` here{why}", {}, remedy)
    fitting, reasons = list[tuple[int, ChannelBundle]](), {}
    for bundle in channel.bundles:
        profile, why_not = _profile(channel, bundle)
        why_not = why_not or misfit(profile, bundle.memory_floor_bytes, memory, system)
        reasons[bundle.device] = why_not
        if why_not is None:
            fitting.append((profile.memory_budget_bytes if profile else -1, bundle))
    if not fitting:
        remedy = _remedy(channel.bundles, reasons, memory_bytes)
        raise _refused(channel, "has no bundle for this machine", reasons, remedy)
    return max(fitting, key=lambda item: item[0])[1]


def check_version(channel: Channel, version: str) -> None:
    """Raise DeviceRefused if this moec is older than the channel demands.

    version: version of this moec; one without numbers, of a tree that is not installed, is not compared.
    Raises ChannelRefused if the channel demands no version.
    """
    wanted, present = version_numbers(channel.minimum_moec), version_numbers(version)
    if wanted is None:
        raise ChannelRefused(
            f"channel `{channel.channel}`: minimum_moec: expected a version, found `{channel.minimum_moec[:40]}`",
            "push the channel again",
        )
    if present is not None and present < wanted:
        raise DeviceRefused(
            f"the channel `{channel.channel}` needs moec {channel.minimum_moec}, this is {version}",
            "install a newer moec on this device",
        )


def _profile(channel: Channel, bundle: ChannelBundle) -> tuple[DeviceProfile | None, str | None]:
    """Return the profile of a bundle if it states one, and why it cannot be used."""
    if not bundle.device_json:
        return None, None
    try:
        return decode_device(bundle.device_json.encode(), f"{channel.channel}, {bundle.device}"), None
    except BundleError as error:
        return None, f"its profile cannot be read: {error.message}"
    except UnicodeEncodeError:
        return None, "its profile is no text"


def misfit(profile: DeviceProfile | None, floor_bytes: int, memory_bytes: int, system: Path = _SYSTEM) -> str | None:
    """Return why a bundle is not for this machine, in words, or None.

    profile: of the bundle; None: it states none.
    floor_bytes: least memory of a run.
    memory_bytes: memory that a run may take here.
    """
    difference = None if profile is None else first_difference(profile, system)
    return difference or _lack_of_memory(floor_bytes, memory_bytes)


def _lack_of_memory(floor_bytes: int, memory_bytes: int) -> str | None:
    """Return why the memory does not do for a bundle, in words, or None."""
    if floor_bytes <= memory_bytes:
        return None
    needed, there = option_bytes(floor_bytes, memory_bytes), limit_bytes(memory_bytes)
    return f"it needs {needed} of memory, {there} are there"


def _remedy(bundles: Sequence[ChannelBundle], reasons: dict[str, str | None], memory_bytes: int | None) -> str:
    """Return the remedy: more memory, if a user has bounded it and a bundle lacks nothing else."""
    if memory_bytes is not None and any(
        reasons[bundle.device] == _lack_of_memory(bundle.memory_floor_bytes, memory_bytes) is not None
        for bundle in bundles
    ):
        return "give a larger --memory"
    return "name one of them with --device, or compile for this device"


def _refused(channel: Channel, what: str, reasons: dict[str, str | None], remedy: str) -> DeviceRefused:
    """Return the error, with every device of the channel on a line of its own."""
    listed = [bundle.device for bundle in channel.bundles]
    lines = [f"\n- {name[:80]}" + (f": {reasons[name]}" if reasons.get(name) else "") for name in listed[:_MOST_LISTED]]
    more = f"\n- and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    return DeviceRefused(
        f"the channel `{channel.channel}` of `{channel.model[:80]}` {what}; it has bundles for:{''.join(lines)}{more}",
        remedy,
    )


def read_channel(
    store: Store, name: str, keys: Sequence[PublicKey], now: datetime, warn: Callable[[str], object]
) -> Channel:
    """Return a channel whose signature, name and expiry were checked.

    now: moment in UTC. A clock before the date of the channel is told, and the sequence decides.
    Raises StoreFailed if there is none. Raises SignatureInvalid, ChannelRefused, InputError.
    """
    path = named_channel_path(name)
    place = f"{store.address}/{path}"
    data = store.read_small(path, MAX_CHANNEL_BYTES)
    if data is None:
        raise StoreFailed(f"`{store.address}` has no channel `{name}`", "name another channel, or push it first")
    channel = verify_channel(data, keys, place)
    if channel.channel != name:
        raise ChannelRefused(
            f"`{place}` is the channel `{channel.channel}`, expected `{name}`", "get it from another store"
        )
    if now >= decode_moment(channel.expires):
        raise ChannelRefused(
            f"the channel `{name}` with sequence {channel.sequence} expired at {channel.expires}",
            "push it again, and check the clock of this device",
        )
    if now < decode_moment(channel.created):
        warn(
            f"the clock of this device is before {channel.created}, when the channel `{name}` was signed; "
            "its sequence decides, but nobody notices if it has expired"
        )
    return channel


def check_channel(channel: Channel, state: DeviceState | None) -> None:
    """Compare a channel with what a device remembers.

    Raises ChannelRefused for another model, and for a lower sequence than the device has seen.
    """
    if state is None:
        return
    if channel.model != state.model:
        raise ChannelRefused(
            f"the channel has bundles of `{channel.model[:80]}`, this folder those of `{state.model[:80]}`",
            "name another folder",
        )
    highest = state.channel(channel.channel).highest_sequence
    if channel.sequence < highest:
        raise ChannelRefused(
            f"the channel `{channel.channel}` has sequence {channel.sequence}, this device has seen {highest}",
            "the store is out of date, or someone replays an old channel: use another store, or push again",
        )


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature was checked, with the bytes of both files."""

    manifest: BundleManifest
    manifest_bytes: bytes
    signature: bytes


def read_signed_manifest(
    store: Store, channel: Channel, bundle: ChannelBundle, keys: Sequence[PublicKey], left_manifest: bytes | None
) -> SignedManifest:
    """Return the manifest that a channel names.

    left_manifest: `moec.json` of an earlier pull, or None.
    Raises StoreFailed, BundleError. Raises DeviceRefused if the format is too new for this moec.
    """
    digest = bundle.manifest_sha256
    path = bundle_path(digest, MANIFEST_NAME)
    place = f"{store.address}/{path}"
    data = left_manifest
    if data is None or not _is_named(data, bundle):
        data = store.read_small(path, bundle.manifest_bytes)
    if data is None:
        raise StoreFailed(f"`{place}`: there is no such file", _PUSH_AGAIN)
    if not _is_named(data, bundle):
        raise ChecksumMismatch(f"`{place}` differs from the digest in the channel", _SEND_AGAIN)
    signature = store.read_small(signature_path(digest), MAX_SIGNATURE_BYTES)
    if signature is None:
        raise SignatureInvalid(f"`{store.address}/{signature_path(digest)}`: there is no signature", _PUSH_AGAIN)
    try:
        manifest = decode_manifest(data, place)
    except UnknownFormatVersion as error:
        raise DeviceRefused(error.message, "install a newer moec on this device") from error
    verify_signature(signature, data, manifest, keys, f"{store.address}/{signature_path(digest)}")
    manifest_bytes = len(data)
    total = manifest_bytes + sum(entry.size_bytes for entry in manifest.files)
    for what, stated, actual in (
        ("model", channel.model, manifest.name),
        ("device", bundle.device, manifest.device.profile),
        ("total_bytes", bundle.total_bytes, total),
    ):
        if stated != actual:
            raise ChannelRefused(
                f"the channel `{channel.channel}` states `{what}` as {str(stated)[:80]}, the bundle {str(actual)[:80]}",
                "push the channel again",
            )
    if not manifest.certified:
        raise ChannelRefused(f"the bundle of `{bundle.device}` is not certified", "push a finished bundle")
    return SignedManifest(manifest, data, signature)


def _is_named(data: bytes, bundle: ChannelBundle) -> bool:
    """Return whether these bytes are the `moec.json` that the channel names."""
    return len(data) == bundle.manifest_bytes and hashlib.sha256(data).hexdigest() == bundle.manifest_sha256
