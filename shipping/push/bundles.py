"""Bundles that are to be pushed: opened, compared with each other, and checked before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moec.manifests.bundle import DEVICE_NAME, MANIFEST_NAME, FileEntry
from moec.manifests.errors import InputError, SignatureInvalid
from moec.manifests.files.limits import MAX_DEVICE_BYTES, MAX_MANIFEST_BYTES
from moec.manifests.progress import Progress
from moec.runtime.bundle.device_file import device_of
from moec.runtime.bundle.open_bundle import Bundle, open_bundle, verify_bundle
from moec.runtime.memory.budget import nominal_memory

from ..channel import ChannelBundle
from ..signatures.keys import PrivateKey, PublicKey
from ..signatures.model_signature import read_signature_file, sign_bundle, signature_file, verify_signature


@dataclass(frozen=True, slots=True)
class ReadyBundle:
    """A bundle that may be pushed.

    path: its folder.
    model: name of the model.
    entry: what a channel says about it.
    files: all its files, `moec.json` last.
    signature: content of its signature.
    is_signed_now: whether `NAME.sig` was missing, so that the signature was made for this push.
    format_version: version of its format.
    """

    path: Path
    model: str
    entry: ChannelBundle
    files: tuple[FileEntry, ...]
    signature: bytes
    is_signed_now: bool
    format_version: int


def prepare_bundles(paths: Sequence[Path], key: PrivateKey, accepted: Sequence[PublicKey]) -> list[ReadyBundle]:
    """Open bundles and check everything but the bytes of their files.

    key: signs the bundles that have no `NAME.sig`. An existing one is checked.
    accepted: keys of existing signatures, in addition to the public half of `key`.
    Raises BundleError. Raises InputError for bundles of several models, and for two bundles of one device.
    """
    ready = list[ReadyBundle]()
    for path in paths:
        with open_bundle(path) as opened:
            ready.append(_prepare(opened, key, accepted))
    for later, bundle in enumerate(ready):
        for other in ready[:later]:
            if bundle.model != other.model:
                raise InputError(
                    f"`{bundle.path}` is a bundle of `{bundle.model[:80]}`, `{other.path}` of `{other.model[:80]}`",
                    "push each model to a place of its own",
                )
            if bundle.entry.device == other.entry.device:
                raise InputError(
                    f"`{other.path}` and `{bundle.path}` are both for the device `{bundle.entry.device}`",
                    "push one bundle for each device",
                )
    return ready


def verify_bundles(ready: Sequence[ReadyBundle], progress: Progress | None = None) -> None:
    """Compare every byte of the bundles with its digest. Raises BundleError.

    progress: called with (bytes done, bytes in all).
    """
    total, before = sum(bundle.entry.total_bytes for bundle in ready), 0
    for bundle in ready:

        def report(done: int, of_bundle: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        with open_bundle(bundle.path) as opened:
            verify_bundle(opened, report)
        before += bundle.entry.total_bytes


def _prepare(bundle: Bundle, key: PrivateKey, accepted: Sequence[PublicKey]) -> ReadyBundle:
    manifest = bundle.manifest
    manifest_bytes = bundle.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    manifest_file = FileEntry(MANIFEST_NAME, len(manifest_bytes), hashlib.sha256(manifest_bytes).hexdigest())
    files = (*manifest.files, manifest_file)
    device_json = ""
    if device_of(bundle) is not None:
        device_json = bundle.read_file(DEVICE_NAME, MAX_DEVICE_BYTES).decode()
    entry = ChannelBundle(
        device=manifest.device.profile,
        device_json=device_json,
        manifest_sha256=manifest_file.sha256,
        manifest_bytes=manifest_file.size_bytes,
        total_bytes=sum(file.size_bytes for file in files),
        memory_floor_bytes=nominal_memory(manifest).floor_bytes,
        required_cpu_features=(),
    )
    place = signature_file(bundle.path)
    is_missing = not place.exists()
    if is_missing:
        signature = sign_bundle(manifest_bytes, manifest, key)
    else:
        signature = read_signature_file(place)
        try:
            verify_signature(signature, manifest_bytes, manifest, [key.public, *accepted], str(place))
        except SignatureInvalid as error:
            raise SignatureInvalid(error.message, f"sign the bundle again: moec sign {bundle.path}") from error
    return ReadyBundle(bundle.path, manifest.name, entry, files, signature, is_missing, manifest.format_version)
