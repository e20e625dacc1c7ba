"""Channels as files: signed when they are written, verified when they are read.

* `sign_channel(channel, *private_keys)` -> bytes of the file
* `verify_channel(data, keys, place)` -> Channel; nothing of it is used before its signature is checked
"""

from __future__ import annotations

from collections.abc import Sequence

from moec.manifests.codec import DecodeError, canonical_json, from_plain, to_plain
from moec.manifests.errors import ChannelRefused, InputError
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from .channel import CHANNEL_VERSION, MAX_CHANNEL_BYTES, PAYLOAD_TYPE, Channel, channel_path
from .signatures.dsse import sign_envelope, verify_envelope
from .signatures.keys import PrivateKey, PublicKey

CHANNEL_JSON = JsonLimits(MAX_CHANNEL_BYTES, containers=1 << 13, values=1 << 17, texts=1 << 17, depth=4)
"""The payload of a channel: some thousand bundles."""
_PUSH_AGAIN = "push the channel again"


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
