"""Push: check bundles, put their files on a store, then name them in the channel.

The channel is written last, so it never names a file that is not there. An interrupted push goes on when it is
repeated: what is on the store with the right content is not sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from moec.manifests.bundle import DEVICE_NAME, MANIFEST_NAME, FileEntry
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import BundleError, DoesNotFit, InputError, OptionError, SignatureInvalid, StoreFailed
from moec.manifests.files.limits import MAX_DEVICE_BYTES, MAX_MANIFEST_BYTES
from moec.manifests.progress import Progress
from moec.runtime.bundle.device_file import device_of
from moec.runtime.bundle.open_bundle import Bundle, open_bundle, verify_bundle
from moec.runtime.memory.budget import nominal_memory

from .channel import (
    CHANNEL_VERSION,
    DEFAULT_CHANNEL,
    MAX_CHANNEL_BYTES,
    Channel,
    ChannelBundle,
    bundle_path,
    encode_moment,
    named_channel_path,
    sign_channel,
    signature_path,
    verify_channel,
    version_numbers,
)
from .signatures.keys import PrivateKey, PublicKey
from .signatures.model_signature import (
    MAX_SIGNATURE_BYTES,
    read_signature,
    read_signature_file,
    sign_bundle,
    signature_file,
    verify_signature,
)
from .store.interface import Store

LEAST_MOEC = dict.fromkeys((1, 2, 3, 4), "0.2.0")
"""Oldest moec that pulls and runs bundles of each format version."""


@dataclass(frozen=True, slots=True)
class ChannelRequest:
    """Content of the next channel.

    name: name of the channel.
    lasting: time until it expires.
    minimum_moec: oldest moec that may install its bundles; None: what their formats need.
    sequence: its sequence; None: one more than that of the channel on the store.
    only: whether it names the pushed bundles alone. False: bundles for other devices stay in it.
    """

    name: str = DEFAULT_CHANNEL
    lasting: timedelta = timedelta(days=90)
    minimum_moec: str | None = None
    sequence: int | None = None
    only: bool = False


@dataclass(slots=True)
class SentBundle:
    """Result of a push for one bundle.

    sent_files, sent_bytes: what the store did not have.
    """

    bundle: ReadyBundle
    sent_files: int = 0
    sent_bytes: int = 0


def push_bundles(
    paths: Sequence[Path],
    store: Store,
    key: PrivateKey,
    request: ChannelRequest,
    now: datetime,
    accepted: Sequence[PublicKey] = (),
    again: bool = False,
    verifying: Progress | None = None,
    sending: Progress | None = None,
) -> tuple[Channel, list[SentBundle]]:
    """Put bundles on a store and name them in a channel. Return the channel, and what was sent.

    paths: folders of the bundles, of one model, at most one for each device.
    key: signs the channel, and bundles without a signature.
    now: moment in UTC.
    accepted: further keys whose signatures may be on the channel before, and on bundles.
    again: send all files, whatever is on the store.
    verifying: called with the bytes done and the bytes in all, while bundles are checked.
    sending: the same, while files are sent or found on the store.
    Raises BundleError, InputError, OptionError before anything is sent. Raises StoreFailed, DoesNotFit.
    """
    ready = prepare_bundles(paths, key, accepted)
    keys = [key.public, *accepted]
    data_before, before = _channel_on(store, request.name, keys)
    known_channels = [] if before is None else [before]
    if request.name != DEFAULT_CHANNEL:
        try:
            _, default = _channel_on(store, DEFAULT_CHANNEL, keys)
        except BundleError:  # of other keys
            default = None
        known_channels += [] if default is None else [default]
    for known in known_channels:
        if known.model != ready[0].model:
            raise InputError(
                f"`{store.address}` has bundles of `{known.model[:80]}`, these are of `{ready[0].model[:80]}`",
                "push each model to a place of its own",
            )
    channel = _next_channel(before, ready, request, now)
    data = sign_channel(channel, key)
    if len(data) > MAX_CHANNEL_BYTES:
        raise DoesNotFit(f"the channel has {len(data)} bytes, at most {MAX_CHANNEL_BYTES}", "push fewer devices")
    verify_bundles(ready, verifying)
    if not again:
        _note_stored_files(store, known_channels)
    sent = _send(store, ready, sending, again)
    for bundle in ready:
        _put_signature(store, bundle, key.public)
    path = named_channel_path(request.name)
    if store.read_small(path, MAX_CHANNEL_BYTES) != data_before:
        raise StoreFailed(f"`{store.address}/{path}` has changed during the push", "push again: no file is sent twice")
    store.replace(path, data)
    return channel, sent


def _channel_on(store: Store, name: str, keys: Sequence[PublicKey]) -> tuple[bytes | None, Channel | None]:
    """Return the file of a channel on a store and its content, or None for both.

    Raises SignatureInvalid if none of the keys signed it. Raises InputError for a name that is no channel's.
    Raises StoreFailed, ChannelRefused.
    """
    path = named_channel_path(name)
    data = store.read_small(path, MAX_CHANNEL_BYTES)
    if data is None:
        return None, None
    place = f"{store.address}/{path}"
    try:
        channel = verify_channel(data, keys, place)
    except SignatureInvalid as error:
        raise SignatureInvalid(error.message, "name the key that it was signed with: --accept-key FILE.pub") from error
    if channel.channel != name:
        raise InputError(f"`{place}` is the channel `{channel.channel}`", "put the right file there, or remove it")
    return data, channel


def _next_channel(
    before: Channel | None, ready: Sequence[ReadyBundle], request: ChannelRequest, now: datetime
) -> Channel:
    """Return the channel after a push.

    Raises OptionError for a sequence that is not higher than the present one, and for too long a time.
    """
    pushed = {bundle.entry.device: bundle.entry for bundle in ready}
    remaining = [] if before is None or request.only else [b for b in before.bundles if b.device not in pushed]
    present = 0 if before is None else before.sequence
    sequence = present + 1 if request.sequence is None else request.sequence
    if sequence <= present:
        raise OptionError(
            f"`--sequence {sequence}` is not higher than {present}, which the channel has on the store",
            f"give {present + 1} or more, or leave it out",
        )
    needs = [LEAST_MOEC[bundle.format_version] for bundle in ready]
    needs += [before.minimum_moec] if before and remaining else []
    try:
        return Channel(
            version=CHANNEL_VERSION,
            model=ready[0].model,
            channel=request.name,
            sequence=sequence,
            created=encode_moment(now),
            expires=encode_moment(now + request.lasting),
            minimum_moec=request.minimum_moec or max(needs, key=lambda text: version_numbers(text) or ()),
            bundles=tuple(sorted([*pushed.values(), *remaining], key=lambda bundle: bundle.device)),
        )
    except (ValueError, OverflowError) as error:
        raise OptionError(f"there is no such channel: {error}", "give other options") from error


def _note_stored_files(store: Store, channels: Sequence[Channel]) -> None:
    """Tell a store the contents of the bundles that it has, so that equal files are not sent. Raises StoreFailed."""
    for digest, size_bytes in {(b.manifest_sha256, b.manifest_bytes) for channel in channels for b in channel.bundles}:
        path = bundle_path(digest, MANIFEST_NAME)
        data = store.read_small(path, size_bytes) if store.size_bytes(path) == size_bytes else None
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            continue
        try:
            files = decode_manifest(data, path).files
        except BundleError:  # of a newer format
            continue
        for file in files:
            store.note(bundle_path(digest, file.name), file.size_bytes, file.sha256)


def _send(store: Store, ready: Sequence[ReadyBundle], progress: Progress | None, again: bool) -> list[SentBundle]:
    """Send the files that a store does not have, bundle by bundle, and report the bytes."""
    total_bytes = sum(bundle.entry.total_bytes for bundle in ready)
    done_bytes = end_bytes = 0
    results = list[SentBundle]()

    def advance(sent_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes = min(done_bytes + sent_bytes, end_bytes)  # a repeated request sends bytes again
        if progress is not None:
            progress(done_bytes, total_bytes)

    for bundle in ready:
        result, folder = SentBundle(bundle), bundle.entry.manifest_sha256
        for file in bundle.files:
            end_bytes += file.size_bytes
            source = bundle.path / file.name
            if store.put(bundle_path(folder, file.name), source, file.size_bytes, file.sha256, advance, again):
                result.sent_files += 1
                result.sent_bytes += file.size_bytes
            done_bytes = end_bytes
            advance(0)
        store.commit(folder)
        results.append(result)
    return results


def _put_signature(store: Store, bundle: ReadyBundle, key: PublicKey) -> None:
    """Write the signature of a bundle, unless the store has it, or another one by the same key."""
    path = signature_path(bundle.entry.manifest_sha256)
    stored = store.read_small(path, MAX_SIGNATURE_BYTES)
    if stored == bundle.signature:
        return
    if stored is not None and bundle.is_signed_now:
        try:
            _, signed = read_signature(stored, [key], str(bundle.path))
        except BundleError:
            signed = {}
        if signed == {file.name: file.sha256 for file in bundle.files}:
            return
    store.replace(path, bundle.signature)


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
