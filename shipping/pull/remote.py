"""Read a channel from a store, then `moec.json` and the signature of its bundle. Both are checked before use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from moec.manifests.bundle import MANIFEST_NAME, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import (
    ChannelRefused,
    ChecksumMismatch,
    DeviceRefused,
    SignatureInvalid,
    StoreFailed,
    UnknownFormatVersion,
)

from ..channel import (
    MAX_CHANNEL_BYTES,
    MAX_SIGNATURE_BYTES,
    Channel,
    ChannelBundle,
    bundle_path,
    decode_moment,
    signature_path,
)
from ..installed.state import DeviceState
from ..signatures.keys import PublicKey
from ..signatures.model_signature import verify_signature
from ..signed_channel import named_channel_path, verify_channel
from ..store.interface import Store

_PUSH_AGAIN = "push the bundle again"
_SEND_AGAIN = "send the files again: moec push BUNDLE DEST --again"


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
    _check_described(channel, bundle, manifest, len(data))
    return SignedManifest(manifest, data, signature)


def _is_named(data: bytes, bundle: ChannelBundle) -> bool:
    """Return whether these bytes are the `moec.json` that the channel names."""
    return len(data) == bundle.manifest_bytes and hashlib.sha256(data).hexdigest() == bundle.manifest_sha256


def _check_described(channel: Channel, bundle: ChannelBundle, manifest: BundleManifest, manifest_bytes: int) -> None:
    """Raise ChannelRefused if a channel describes another bundle than its manifest does."""
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
