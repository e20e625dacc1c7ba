"""Signatures, channels and what is in them. No input is accepted with another content than the key signed.

Each input is tried as a whole file, and as content that the key signs: a statement, a channel.
"""

from __future__ import annotations

import functools
import json

from moec.manifests.errors import BundleError
from moec.shipping.channel import PAYLOAD_TYPE, Channel, ChannelBundle, decode_channel, encode_channel
from moec.shipping.signatures import model_signature
from moec.shipping.signatures.dsse import (
    ENVELOPE_JSON,
    compact_json,
    decode_envelope,
    encode_envelope,
    load_json,
    make_envelope,
    sign_envelope,
    verify_envelope,
)
from moec.shipping.signatures.keys import PrivateKey, read_private_key
from tests.fuzz.targets.scratch import file_of

DIGESTS = {"moec.json": "0" * 64, "a": "f" * 64}
CHANNEL = Channel(
    version=1,
    model="tiny",
    channel="stable",
    sequence=1,
    created="2026-11-26T12:00:00Z",
    expires="2027-02-24T12:00:00Z",
    minimum_moec="0.2.0",
    bundles=(ChannelBundle("laptop", "", "a" * 64, 1, 2, 3, ()),),
)


@functools.cache
def key() -> PrivateKey:
    """Return the key, always the same one."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    made = ec.derive_private_key(7, ec.SECP256R1())
    pem = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return read_private_key(file_of("fuzz.pem", pem))


def signature_of(statement: bytes) -> bytes:
    """Return the signature with a statement, signed by the key."""
    envelope = make_envelope(statement, model_signature.PAYLOAD_TYPE, key())
    return compact_json(
        {
            "mediaType": model_signature.MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key().public.key_id}, "tlogEntries": []},
            "dsseEnvelope": encode_envelope(envelope),
        }
    )


def read_as_signature(data: bytes) -> dict[str, str] | None:
    """Return the digests of a signature that is accepted."""
    try:
        return model_signature.read_signature(data, [key().public], "a.sig")[1]
    except BundleError:
        return None


def read_as_envelope(data: bytes) -> None:
    try:
        envelope = decode_envelope(load_json(data, ENVELOPE_JSON, "a.json"), "a.json")
        again = compact_json(encode_envelope(envelope))
        if decode_envelope(json.loads(again), "a.json") != envelope:
            raise AssertionError("an envelope changes when it is written")
        payload = verify_envelope(data, PAYLOAD_TYPE, [key().public], "a.json")
    except BundleError:
        return
    if payload != encode_channel(CHANNEL):
        raise AssertionError("the key did not sign this channel")


def read_as_channel(data: bytes) -> None:
    try:
        channel = decode_channel(data, "a.json")
    except BundleError:
        return
    if encode_channel(channel) != data:
        raise AssertionError("an accepted channel is written in another way")


def target(data: bytes) -> None:
    if read_as_signature(data) not in (None, DIGESTS):
        raise AssertionError("the key did not sign these files")
    read_as_envelope(data)
    read_as_channel(data)
    digests = read_as_signature(signature_of(data))
    if digests is not None and all(name.isascii() for name in digests):
        statement = model_signature.encode_statement("a", digests)
        if read_as_signature(signature_of(statement)) != digests:
            raise AssertionError("accepted digests are refused when they are signed again")


def seeds() -> list[bytes]:
    statement = model_signature.encode_statement("tiny", DIGESTS)
    channel = encode_channel(CHANNEL)
    return [signature_of(statement), sign_envelope(channel, PAYLOAD_TYPE, key()), statement, channel]
