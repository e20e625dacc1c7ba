"""DSSE envelopes: what is signed is what comes back, and everything else is refused."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from moec.manifests.errors import SignatureInvalid
from moec.shipping.signatures import dsse
from tests.shipping.signing_keys import signing_key

KIND = "application/vnd.moec.test+json"
FLIPS = 200 if os.environ.get("MOEC_FULL_GATES") != "1" else 20_000


def sealed(*names: str, payload: bytes = b'{"a": 1}') -> bytes:
    return dsse.sign_envelope(payload, KIND, *(signing_key(name) for name in names or ("fleet",)))


def opened(data: bytes, *names: str) -> bytes:
    return dsse.verify_envelope(data, KIND, [signing_key(name).public for name in names or ("fleet",)], "a.json")


def changed(data: bytes, change: Callable[[Any], None]) -> bytes:
    plain = json.loads(data)
    change(plain)
    return json.dumps(plain).encode()


def test_signed_bytes_are_those_of_the_specification() -> None:
    """The example of protocol.md."""
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert dsse.signed_bytes("http://example.com/HelloWorld", b"hello world") == expected


@pytest.mark.parametrize("payload", [b"", b"{}", bytes(range(256)) * 40])
def test_the_payload_comes_back(payload: bytes) -> None:
    assert opened(sealed(payload=payload)) == payload


def test_equal_payloads_give_equal_envelopes() -> None:
    assert sealed() == sealed()


def test_any_of_the_accepted_keys_will_do() -> None:
    """A device accepts two keys while one replaces the other."""
    assert opened(sealed("fleet"), "next", "fleet") == b'{"a": 1}'
    assert opened(sealed("next"), "next", "fleet") == b'{"a": 1}'
    assert opened(sealed("fleet", "next"), "next") == b'{"a": 1}'
    assert opened(sealed("fleet", "next"), "fleet") == b'{"a": 1}'


def test_another_key_is_refused() -> None:
    with pytest.raises(SignatureInvalid, match="signed by none of the accepted keys"):
        opened(sealed("stranger"), "fleet", "next")


def test_a_signature_without_a_key_id_is_tried_with_every_key() -> None:
    data = changed(sealed(), lambda plain: plain["signatures"][0].pop("keyid"))
    assert opened(data, "next", "fleet") == b'{"a": 1}'
    with pytest.raises(SignatureInvalid, match="found without id"):
        opened(data, "next")


def test_a_wrong_signature_of_an_accepted_key_is_refused_next_to_a_valid_one() -> None:
    def exchange(plain: Any) -> None:
        first, second = plain["signatures"]
        first["sig"], second["sig"] = second["sig"], first["sig"]
        plain["signatures"].append(dict(second, sig=first["sig"], keyid=second["keyid"]))

    with pytest.raises(SignatureInvalid, match="does not fit the content"):
        opened(changed(sealed("fleet", "next"), exchange), "fleet", "next")


def test_another_payload_type_is_refused() -> None:
    """A channel cannot be passed off as a statement, although the same key signs both."""
    with pytest.raises(SignatureInvalid, match="expected `another`"):
        dsse.verify_envelope(sealed(), "another", [signing_key().public], "a.json")
    data = changed(sealed(), lambda plain: plain.update(payloadType="another"))
    with pytest.raises(SignatureInvalid, match="does not fit the content"):
        dsse.verify_envelope(data, "another", [signing_key().public], "a.json")


@pytest.mark.gate("G14")
def test_every_changed_byte_is_refused() -> None:
    data, source = sealed(), random.Random(1)
    for _ in range(FLIPS):
        place = source.randrange(len(data))
        flipped = bytearray(data)
        flipped[place] ^= source.randrange(1, 256)
        with pytest.raises(SignatureInvalid):
            opened(bytes(flipped))


@pytest.mark.gate("G14")
def test_every_cut_is_refused() -> None:
    data = sealed()
    for size in range(len(data)):
        with pytest.raises(SignatureInvalid):
            opened(data[:size])


def test_a_key_id_is_a_digest() -> None:
    data = changed(sealed(), lambda plain: plain["signatures"][0].update(keyid="fleet"))
    with pytest.raises(SignatureInvalid, match="field `keyid`, expected 64 hex digits"):
        opened(data)


def set_signature(text: object) -> Callable[[Any], None]:
    return lambda plain: plain["signatures"][0].update(sig=text)


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.update(more=1),
        lambda plain: plain.pop("payload"),
        lambda plain: plain.update(payload=7),
        lambda plain: plain.update(payload="eyJhIjogMX1="),
        lambda plain: plain.update(payload="eyJhI jogMX0="),
        lambda plain: plain.update(payload="é"),
        lambda plain: plain.update(payloadType=None),
        lambda plain: plain.update(payloadType=""),
        lambda plain: plain.update(payloadType="\ud800"),
        lambda plain: plain.update(payloadType="a" * 201),
        lambda plain: plain.update(signatures=[]),
        lambda plain: plain.update(signatures={}),
        lambda plain: plain.update(signatures=plain["signatures"] * (dsse.MAX_SIGNATURES + 1)),
        lambda plain: plain["signatures"].append("text"),
        lambda plain: plain["signatures"][0].update(more=1),
        lambda plain: plain["signatures"][0].update(keyid="fleet"),
        lambda plain: plain["signatures"][0].update(keyid=None),
        set_signature(None),
        set_signature(""),
        set_signature("AA"),
        set_signature(base64.b64encode(bytes(73)).decode()),
    ],
)
def test_malformed_envelopes_are_refused(change: Callable[[Any], None]) -> None:
    with pytest.raises(SignatureInvalid):
        opened(changed(sealed(), change))


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{", b"[" * 100_000, b'{"a":1,"a":1}', b" " * (5 << 20)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(SignatureInvalid):
        opened(data)


def test_counts_are_bounded() -> None:
    key = signing_key()
    for count in (0, dsse.MAX_SIGNATURES + 1):
        with pytest.raises(ValueError, match="expected 1 to"):
            dsse.sign_envelope(b"", KIND, *[key] * count)
    for count in (0, dsse.MAX_KEYS + 1):
        with pytest.raises(ValueError, match="expected 1 to"):
            dsse.verify_envelope(sealed(), KIND, [key.public] * count, "a.json")
