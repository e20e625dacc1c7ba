"""DSSE envelopes: a payload of a named type, and signatures over both.

* `sign_envelope(payload, payload_type, *private_keys)` -> bytes of an envelope
* `verify_envelope(data, payload_type, keys, place)` -> payload, checked
* `encode_envelope`, `decode_envelope` convert between Envelope and JSON, without a check of signatures

Rules of this reader, in addition to those of DSSE:
* The key of a signature is found by its id. An empty id stands for any of the keys.
* At least one signature is by an accepted key, and every signature that names an accepted key is valid.
* JSON has no further fields, and base64 has its one encoding. So a changed byte of a checked envelope is noticed.

Source: the DSSE specification, version 1.0 (github.com/secure-systems-lab/dsse), protocol.md and envelope.md.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moec.manifests.errors import SignatureInvalid
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from . import p256
from .keys import PrivateKey, PublicKey

MAX_SIGNATURES = 4
"""Signatures of an envelope. Two are used while a key is replaced."""
MAX_KEYS = 8
"""Keys that are accepted at a time. With MAX_SIGNATURES it bounds the time of a check."""
MAX_ENVELOPE_BYTES = 4 << 20
"""Size of an envelope in a file of its own, bytes."""
ENVELOPE_JSON = JsonLimits(MAX_ENVELOPE_BYTES, containers=1 << 4, values=1 << 5, texts=1 << 5, depth=4)
"""An envelope in a file of its own."""
COPY_AGAIN = "get it again from the one who signed it"
_TYPE = re.compile(r"[!-~]{1,200}")
_KEY_ID = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class EnvelopeSignature:
    """One signature of an envelope.

    key_id: PublicKey.key_id of its key, or empty. It is not signed.
    signature: DER.
    """

    key_id: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload with its type and signatures, not yet checked."""

    payload: bytes
    payload_type: str
    signatures: tuple[EnvelopeSignature, ...]


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: the pre-authentication encoding of DSSE."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def make_envelope(payload: bytes, payload_type: str, *private_keys: PrivateKey) -> Envelope:
    """Return an envelope with one signature by each key."""
    if not 1 <= len(private_keys) <= MAX_SIGNATURES:
        raise ValueError(f"expected 1 to {MAX_SIGNATURES} keys, found {len(private_keys)}")
    message = signed_bytes(payload_type, payload)
    signatures = tuple(EnvelopeSignature(key.public.key_id, key.sign(message)) for key in private_keys)
    return Envelope(payload, payload_type, signatures)


def sign_envelope(payload: bytes, payload_type: str, *private_keys: PrivateKey) -> bytes:
    """Return the bytes of an envelope with one signature by each key. Needs `cryptography`."""
    return compact_json(encode_envelope(make_envelope(payload, payload_type, *private_keys)))


def verify_envelope(data: bytes, payload_type: str, keys: Sequence[PublicKey], place: str) -> bytes:
    """Return the payload of an envelope that one of the keys signed.

    data: the file.
    payload_type: the type that the payload must have.
    keys: accepted keys, 1 to MAX_KEYS.
    place: the file, for messages.
    Raises SignatureInvalid.
    """
    envelope = decode_envelope(load_json(data, ENVELOPE_JSON, place), place)
    verify_signatures(envelope, payload_type, keys, place)
    return envelope.payload


def verify_signatures(envelope: Envelope, payload_type: str, keys: Sequence[PublicKey], place: str) -> PublicKey:
    """Return the key of the first valid signature.

    Raises SignatureInvalid if there is none, or if a signature that names an accepted key is wrong.
    """
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ValueError(f"expected 1 to {MAX_KEYS} accepted keys, found {len(keys)}")
    if envelope.payload_type != payload_type:
        stated_type = envelope.payload_type
        raise SignatureInvalid(f"`{place}` has the payload type `{stated_type}`, expected `{payload_type}`", COPY_AGAIN)
    message = signed_bytes(payload_type, envelope.payload)
    accepted = list[PublicKey]()
    for signature in envelope.signatures:
        candidates = [key for key in keys if signature.key_id in ("", key.key_id)]
        signer = next((key for key in candidates if key.verify(message, signature.signature)), None)
        if signer is not None:
            accepted.append(signer)
        elif signature.key_id and candidates:
            raise SignatureInvalid(f"`{place}`: the signature does not fit the content", COPY_AGAIN)
    if not accepted:
        names = ", ".join(signature.key_id[:12] or "without id" for signature in envelope.signatures)
        ours = ", ".join(key.key_id[:12] for key in keys)
        raise SignatureInvalid(
            f"`{place}` is signed by none of the accepted keys: expected {ours}, found {names}",
            "name the public key of the one who signed it: --key FILE.pub",
        )
    return accepted[0]


def encode_envelope(envelope: Envelope) -> dict[str, Any]:
    signatures = [{"sig": _base64(item.signature), "keyid": item.key_id} for item in envelope.signatures]
    return {"payload": _base64(envelope.payload), "payloadType": envelope.payload_type, "signatures": signatures}


def decode_envelope(plain: Any, place: str) -> Envelope:
    """Return the envelope of JSON values. Its signatures are not checked. Raises SignatureInvalid."""
    payload, payload_type, items = fields(plain, ("payload", "payloadType", "signatures"), place)
    if not isinstance(payload_type, str) or not _TYPE.fullmatch(payload_type):
        raise malformed(place, "payloadType", "a media type")
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_SIGNATURES:
        raise malformed(place, "signatures", f"1 to {MAX_SIGNATURES} signatures")
    signatures = tuple(_decode_signature(item, place) for item in items)
    return Envelope(_bytes(payload, place, "payload"), payload_type, signatures)


def _decode_signature(plain: Any, place: str) -> EnvelopeSignature:
    # The specification lets `keyid` be absent, which is the same as empty.
    names = ("sig", "keyid") if isinstance(plain, dict) and "keyid" in plain else ("sig",)
    values = fields(plain, names, place)
    key_id = values[1] if len(values) == 2 else ""
    if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
        raise malformed(place, "keyid", "64 hex digits or nothing")
    signature = _bytes(values[0], place, "sig")
    if len(signature) > p256.MAX_SIGNATURE_BYTES:
        raise malformed(place, "sig", f"at most {p256.MAX_SIGNATURE_BYTES} bytes")
    return EnvelopeSignature(key_id, signature)


def load_json(data: bytes, limits: JsonLimits, place: str) -> Any:
    try:
        return load_strict_json(data, limits)
    except ValueError as error:
        raise SignatureInvalid(f"`{place}` is not strict JSON: {error}", COPY_AGAIN) from error


def compact_json(plain: Any) -> bytes:
    """Encode as UTF-8 without any space. So each changed byte changes a value, or the result is no JSON."""
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fields(plain: Any, names: Sequence[str], place: str) -> list[Any]:
    """Return the values of an object that has exactly these fields. Raises SignatureInvalid."""
    if not isinstance(plain, dict) or set(plain) != set(names):
        raise SignatureInvalid(f"`{place}` is malformed: expected an object with {', '.join(names)}", COPY_AGAIN)
    return [plain[name] for name in names]


def malformed(place: str, field: str, expected: str) -> SignatureInvalid:
    """Return the error for a field that has another value than expected."""
    return SignatureInvalid(f"`{place}` is malformed: field `{field}`, expected {expected}", COPY_AGAIN)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any, place: str, field: str) -> bytes:
    """Return the bytes of base64 in its one encoding. Raises SignatureInvalid."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):  # ValueError: other characters than ASCII
        data = None
    if data is None or _base64(data) != text:
        raise malformed(place, field, "base64")
    return data
