"""Public keys in PEM, and signatures in DER. What is accepted is written again byte for byte."""

from __future__ import annotations

import base64

from moec.manifests.errors import InputError
from moec.shipping.signatures.keys import decode_public_key, encode_public_key
from moec.shipping.signatures.p256 import GENERATOR, decode_signature, is_on_curve, is_signature


def pem_of(der: bytes) -> bytes:
    return b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(der) + b"\n-----END PUBLIC KEY-----\n"


def der_of(number: int) -> bytes:
    size = number.bit_length() // 8 + 1
    return bytes([2, size]) + number.to_bytes(size, "big")


def target(data: bytes) -> None:
    for pem in (data, pem_of(data)):
        try:
            key = decode_public_key(pem, "a.pub")
        except InputError:
            continue
        if not is_on_curve(key.point):
            raise AssertionError("an accepted key is not on the curve")
        if b"".join(encode_public_key(key.point).split()) != b"".join(pem.split()):
            raise AssertionError("an accepted key is written in another way")
    numbers = decode_signature(data)
    if numbers is not None:
        content = b"".join(map(der_of, numbers))
        if bytes([0x30, len(content)]) + content != data:
            raise AssertionError("an accepted signature is written in another way")
    if is_signature(GENERATOR, b"a message that nobody signed", data):
        raise AssertionError("a signature was forged")


def seeds() -> list[bytes]:
    pem = encode_public_key(GENERATOR)
    der = base64.b64decode(b"".join(pem.split(b"\n")[1:-2]))
    content = der_of(GENERATOR[0]) + der_of(1)
    return [pem, der, bytes([0x30, len(content)]) + content]
