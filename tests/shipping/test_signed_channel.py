"""Channels as files: written, signed, verified, read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moec.manifests.codec import canonical_json, to_plain
from moec.manifests.errors import ChannelRefused
from moec.shipping.channel import PAYLOAD_TYPE, Channel, ChannelBundle, encode_channel, sign_channel, verify_channel
from moec.shipping.signatures.dsse import sign_envelope
from tests.shipping.signing_keys import signing_key

BUNDLE = ChannelBundle("laptop", '{"name": "laptop"}\n', "a" * 64, 2000, 5000, 1 << 30, ())
CHANNEL = Channel(
    version=1,
    model="tiny",
    channel="stable",
    sequence=3,
    created="2026-11-26T12:00:00Z",
    expires="2027-02-24T12:00:00Z",
    minimum_moec="0.2.0",
    bundles=(BUNDLE, replace(BUNDLE, device="phone", manifest_sha256="b" * 64)),
)


def read(data: bytes, *names: str) -> Channel:
    return verify_channel(data, [signing_key(name).public for name in names or ("fleet",)], "stable.json")


def test_a_channel_comes_back() -> None:
    assert read(sign_channel(CHANNEL, signing_key())) == CHANNEL


def test_both_keys_of_a_rotation_sign_it() -> None:
    data = sign_channel(CHANNEL, signing_key("fleet"), signing_key("next"))
    assert read(data, "fleet") == read(data, "next") == CHANNEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has channel version 2, this moec reads 1"),
        ({"version": "1"}, "has channel version none"),
        ({"version": True}, "has channel version none"),
        ({"more": 1}, "unknown"),
        ({"sequence": 0}, "sequence"),
        ({"sequence": 1.5}, "expected int"),
        ({"expires": "2026-11-26T12:00:00Z"}, "expires"),
        ({"created": "today"}, "today"),
        ({"channel": "../stable"}, "found `../stable`"),
        ({"bundles": []}, "expected one per device"),
        ({"bundles": to_plain((BUNDLE, BUNDLE))}, "expected one per device"),
        ({"bundles": [{**to_plain(BUNDLE), "manifest_sha256": "../x"}]}, "expected 64 hex digits"),
        ({"bundles": [{**to_plain(BUNDLE), "required_cpu_features": ["avx2"]}]}, "expected no instruction set"),
    ],
)
def test_a_signed_channel_without_sense_is_refused(change: dict[str, Any], message: str) -> None:
    payload = canonical_json({**to_plain(CHANNEL), **change})
    with pytest.raises(ChannelRefused, match=message):
        read(sign_envelope(payload, PAYLOAD_TYPE, signing_key()))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (encode_channel(CHANNEL) + b"\n", "in another form"),
        (encode_channel(CHANNEL).replace(b'"tiny"', b'"t\\u0069ny"'), "in another form"),
        (encode_channel(CHANNEL).replace(b'"tiny"', b'"\\ud800"'), "surrogates not allowed"),
    ],
)
def test_a_channel_has_one_form(payload: bytes, message: str) -> None:
    """A device writes what it has read into its own files, so half a surrogate pair must not come so far."""
    with pytest.raises(ChannelRefused, match=message):
        read(sign_envelope(payload, PAYLOAD_TYPE, signing_key()))


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"version": 1, "version": 1}', b"[" * 1000])
def test_a_signed_payload_that_is_no_channel_is_refused(payload: bytes) -> None:
    with pytest.raises(ChannelRefused):
        read(sign_envelope(payload, PAYLOAD_TYPE, signing_key()))


def test_equal_channels_give_equal_files() -> None:
    assert encode_channel(CHANNEL) == encode_channel(replace(CHANNEL))
    assert sign_channel(CHANNEL, signing_key()) == sign_channel(CHANNEL, signing_key())
