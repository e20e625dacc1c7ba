"""A channel: the signed list of bundles that devices may install, one per device. It is the only file that changes.

A channel is a DSSE envelope (`signatures/dsse.py`) whose payload is the canonical JSON of `Channel`. It is signed when
it is written, and nothing of it is used before its signature is checked.
Source: docs/design/shipping.md, Channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from moec.manifests.codec import DecodeError, canonical_json, from_plain, to_plain
from moec.manifests.errors import ChannelRefused, InputError
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from .signatures.dsse import sign_envelope, verify_envelope
from .signatures.keys import PrivateKey, PublicKey

PAYLOAD_TYPE = "application/vnd.moec.channel.v1+json"
CHANNEL_VERSION = 1
MAX_CHANNEL_BYTES = 4 << 20
"""Size of a channel file, bytes."""
DEFAULT_CHANNEL = "stable"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9}){0,3})(?:[.+-]?[A-Za-z].*)?")
_MOMENT = "%Y-%m-%dT%H:%M:%SZ"
MAX_SEQUENCE = 1 << 53
CHANNEL_JSON = JsonLimits(MAX_CHANNEL_BYTES, containers=1 << 13, values=1 << 17, texts=1 << 17, depth=4)
"""The payload of a channel: some thousand bundles."""
_PUSH_AGAIN = "push the channel again"


def channel_path(channel: str) -> str:
    """Return the path of a channel on the store. Raises ValueError for a name that is no channel's."""
    if not _NAME.fullmatch(channel):
        raise ValueError(f"expected lower-case letters, digits, dots, underscores and hyphens, found `{channel[:80]}`")
    return f"channel/{channel}.json"


def bundle_path(manifest_sha256: str, file: str) -> str:
    return f"{manifest_sha256}/{file}"


def signature_path(manifest_sha256: str) -> str:
    """Return the path of a bundle's signature on the store. It lies next to the folder, as on a device."""
    return f"{manifest_sha256}.sig"


def version_numbers(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a version without zeros at the end, or None if it has no numbers."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return None
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def encode_moment(moment: datetime) -> str:
    """Return a moment in UTC, in whole seconds."""
    return moment.astimezone(timezone.utc).strftime(_MOMENT)


def decode_moment(text: str) -> datetime:
    """Return the moment of `encode_moment`. Raises ValueError."""
    return datetime.strptime(text, _MOMENT).replace(tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class ChannelBundle:
    """One bundle of a channel.

    device: name of the device profile that it was compiled for.
    device_json: the profile, as `device.json` of the bundle has it; empty if the bundle has no such file.
    manifest_sha256: SHA-256 of `moec.json`, in hex. It names the folder on the store.
    manifest_bytes: size of `moec.json`.
    total_bytes: size of all files, `moec.json` included.
    memory_floor_bytes: least memory of a run with the default context.
    required_cpu_features: none, because every processor runs every bundle.
    """

    device: str
    device_json: str
    manifest_sha256: str
    manifest_bytes: int
    total_bytes: int
    memory_floor_bytes: int
    required_cpu_features: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.manifest_sha256):
            raise ValueError(f"manifest_sha256: expected 64 hex digits, found `{self.manifest_sha256[:80]}`")
        if not 0 < self.manifest_bytes <= self.total_bytes:
            raise ValueError(f"manifest_bytes: expected 1 to {self.total_bytes}, found {self.manifest_bytes}")
        if self.required_cpu_features:
            raise ValueError(
                f"required_cpu_features: expected no instruction set, found `{self.required_cpu_features[0][:40]}`"
            )
        if self.memory_floor_bytes < 0:
            raise ValueError(f"memory_floor_bytes: expected at least 0, found {self.memory_floor_bytes}")


@dataclass(frozen=True, slots=True)
class Channel:
    """Content of a channel.

    version: CHANNEL_VERSION.
    model: name of the model, as in the manifests of all its bundles.
    channel: name of the channel.
    sequence: a number that grows with every push. A device never goes back to a lower one.
    created, expires: moments in UTC, as `2026-11-26T12:00:00Z`.
    minimum_moec: least version of moec that runs all its bundles.
    bundles: the bundles, at most one per device.
    Raises ValueError.
    """

    version: int
    model: str
    channel: str
    sequence: int
    created: str
    expires: str
    minimum_moec: str
    bundles: tuple[ChannelBundle, ...]

    def __post_init__(self) -> None:
        if self.version != CHANNEL_VERSION:
            raise ValueError(f"version: expected {CHANNEL_VERSION}, found {self.version}")
        channel_path(self.channel)
        if not 1 <= self.sequence <= MAX_SEQUENCE:
            raise ValueError(f"sequence: expected 1 to {MAX_SEQUENCE}, found {self.sequence}")
        if decode_moment(self.expires) <= decode_moment(self.created):
            raise ValueError(f"expires: expected a moment after {self.created}, found {self.expires}")
        devices = [bundle.device for bundle in self.bundles]
        if not devices or len(set(devices)) != len(devices):
            raise ValueError(f"bundles: expected one per device, found the devices {devices[:20]}")


def named_channel_path(name: str) -> str:
    """Return the path of a channel that a user named. Raises InputError."""
    try:
        return channel_path(name)
    except ValueError as error:
        raise InputError(f"`{name[:80]}` is no name of a channel: {error}", "name one like `stable`") from error


def encode_channel(channel: Channel) -> bytes:
    """Return the payload of a channel. Equal channels give equal bytes."""
    return canonical_json(to_plain(channel))


def decode_channel(data: bytes, place: str) -> Channel:
    """Return the channel of a payload whose signature has been verified.

    place: the file, for messages.
    Raises ChannelRefused.
    """
    try:
        plain = load_strict_json(data, CHANNEL_JSON)
    except ValueError as error:
        raise ChannelRefused(f"`{place}` holds no strict JSON: {error}", _PUSH_AGAIN) from error
    version = plain.get("version") if isinstance(plain, dict) else None
    if type(version) is not int or version != CHANNEL_VERSION:
        stated = f"{version}" if type(version) is int else "none"
        message = f"`{place}` has channel version {stated[:40]}, this moec reads {CHANNEL_VERSION}"
        raise ChannelRefused(message, "use a matching moec")
    try:
        channel: Channel = from_plain(Channel, plain)
        is_canonical = encode_channel(channel) == data
    except (DecodeError, UnicodeEncodeError) as error:  # half a surrogate pair
        raise ChannelRefused(f"`{place}`: {error}", _PUSH_AGAIN) from error
    if not is_canonical:
        raise ChannelRefused(f"`{place}` holds a channel in another form than moec writes", _PUSH_AGAIN)
    return channel


def sign_channel(channel: Channel, *private_keys: PrivateKey) -> bytes:
    """Return the file of a channel, signed by each key. Needs `cryptography`."""
    return sign_envelope(encode_channel(channel), PAYLOAD_TYPE, *private_keys)


def verify_channel(data: bytes, keys: Sequence[PublicKey], place: str) -> Channel:
    """Return the channel of a file that one of the keys signed.

    Its name, model, sequence and moments are what was signed. The caller compares them with what it expects.
    data: the file, at most MAX_CHANNEL_BYTES.
    keys: accepted keys.
    place: the file, for messages.
    Raises SignatureInvalid, ChannelRefused.
    """
    return decode_channel(verify_envelope(data, PAYLOAD_TYPE, keys, place), place)
