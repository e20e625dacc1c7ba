"""Read `moec.json` and the signature of a bundle from a store, and check both before anything else is fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

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

from ..channel import MAX_SIGNATURE_BYTES, Channel, ChannelBundle, bundle_path, signature_path
from ..signatures.keys import PublicKey
from ..signatures.model_signature import verify_signature
from ..store.interface import Store

_PUSH_AGAIN = "push the bundle again"
_SEND_AGAIN = "send the files again: moec push BUNDLE DEST --again"


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature was checked, with the bytes of both files."""

    manifest: BundleManifest
    manifest_bytes: bytes
    signature: bytes


def read_signed_manifest(
    store: Store, channel: Channel, bundle: ChannelBundle, keys: Sequence[PublicKey], kept: bytes | None
) -> SignedManifest:
    """Return the manifest that a channel names.

    kept: `moec.json` of an earlier pull, or None.
    Raises StoreFailed, BundleError. Raises DeviceRefused if the format is too new for this moec.
    """
    digest = bundle.manifest_sha256
    path = bundle_path(digest, MANIFEST_NAME)
    place = f"{store.address}/{path}"
    data = kept if kept is not None and _is_named(kept, bundle) else store.read_small(path, bundle.manifest_bytes)
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
    _check_channel(channel, bundle, manifest, len(data))
    return SignedManifest(manifest, data, signature)


def _is_named(data: bytes, bundle: ChannelBundle) -> bool:
    """Return whether these bytes are the `moec.json` that the channel names."""
    return len(data) == bundle.manifest_bytes and hashlib.sha256(data).hexdigest() == bundle.manifest_sha256


def _check_channel(channel: Channel, bundle: ChannelBundle, manifest: BundleManifest, manifest_bytes: int) -> None:
    """Raise ChannelRefused if a channel describes another bundle than its manifest does."""
    total = manifest_bytes + sum(entry.size_bytes for entry in manifest.files)
    for what, stated, found in (
        ("model", channel.model, manifest.name),
        ("device", bundle.device, manifest.device.profile),
        ("total_bytes", bundle.total_bytes, total),
    ):
        if stated != found:
            raise ChannelRefused(
                f"the channel `{channel.channel}` states `{what}` as {str(stated)[:80]}, the bundle {str(found)[:80]}",
                "push the channel again",
            )
    if not manifest.certified:
        raise ChannelRefused(f"the bundle of `{bundle.device}` is not certified", "push a finished bundle")
