"""The channel on a store before a push, and the one after it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import BundleError, InputError, OptionError, SignatureInvalid

from ..channel import (
    CHANNEL_VERSION,
    DEFAULT_CHANNEL,
    MAX_CHANNEL_BYTES,
    Channel,
    bundle_path,
    encode_moment,
    version_numbers,
)
from ..signatures.keys import PublicKey
from ..signed_channel import named_channel_path, verify_channel
from ..store.interface import Store
from .bundles import ReadyBundle

LEAST_MOEC = {1: "0.2.0", 2: "0.2.0"}
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


@dataclass(frozen=True, slots=True)
class FoundChannel:
    """A channel as it is on a store.

    data: content of its file, None if there is none.
    channel: the verified channel, None if there is none.
    """

    data: bytes | None
    channel: Channel | None


def find_channel(store: Store, name: str, keys: Sequence[PublicKey]) -> FoundChannel:
    """Return the channel of a store.

    keys: accepted keys.
    Raises SignatureInvalid if none of them signed it. Raises InputError for a name that is no channel's.
    Raises StoreFailed, ChannelRefused.
    """
    path = named_channel_path(name)
    data = store.read_small(path, MAX_CHANNEL_BYTES)
    if data is None:
        return FoundChannel(None, None)
    place = f"{store.address}/{path}"
    try:
        channel = verify_channel(data, keys, place)
    except SignatureInvalid as error:
        raise SignatureInvalid(error.message, "name the key that it was signed with: --accept-key FILE.pub") from error
    if channel.channel != name:
        raise InputError(f"`{place}` is the channel `{channel.channel}`", "put the right file there, or remove it")
    return FoundChannel(data, channel)


def other_bundles(
    store: Store, found: FoundChannel, request: ChannelRequest, keys: Sequence[PublicKey]
) -> list[Channel]:
    """Return the channels of a store that name bundles which are on it: this one, and the default one.

    A default channel of other keys is left out.
    """
    channels = [] if found.channel is None else [found.channel]
    if request.name != DEFAULT_CHANNEL:
        try:
            default = find_channel(store, DEFAULT_CHANNEL, keys).channel
        except BundleError:
            default = None
        channels += [] if default is None else [default]
    return channels


def require_same_model(store: Store, channels: Sequence[Channel], model: str) -> None:
    """Raise InputError if a store has another model."""
    for channel in channels:
        if channel.model != model:
            raise InputError(
                f"`{store.address}` has bundles of `{channel.model[:80]}`, these are of `{model[:80]}`",
                "push each model to a place of its own",
            )


def note_stored_files(store: Store, channels: Sequence[Channel]) -> None:
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


def next_channel(
    before: Channel | None, ready: Sequence[ReadyBundle], request: ChannelRequest, now: datetime
) -> Channel:
    """Return the channel after a push.

    before: the one on the store.
    now: moment in UTC.
    Raises OptionError for a sequence that is not higher than the present one, and for too long a time.
    """
    pushed = {bundle.entry.device: bundle.entry for bundle in ready}
    kept = [] if before is None or request.only else [b for b in before.bundles if b.device not in pushed]
    present = 0 if before is None else before.sequence
    sequence = present + 1 if request.sequence is None else request.sequence
    if sequence <= present:
        raise OptionError(
            f"`--sequence {sequence}` is not higher than {present}, which the channel has on the store",
            f"give {present + 1} or more, or leave it out",
        )
    needs = [LEAST_MOEC[bundle.format_version] for bundle in ready] + ([before.minimum_moec] if before and kept else [])
    try:
        return Channel(
            version=CHANNEL_VERSION,
            model=ready[0].model,
            channel=request.name,
            sequence=sequence,
            created=encode_moment(now),
            expires=encode_moment(now + request.lasting),
            minimum_moec=request.minimum_moec or max(needs, key=lambda text: version_numbers(text) or ()),
            bundles=tuple(sorted([*pushed.values(), *kept], key=lambda bundle: bundle.device)),
        )
    except (ValueError, OverflowError) as error:
        raise OptionError(f"there is no such channel: {error}", "give other options") from error
