"""ECDSA over P-256 with the standard library gives the verdicts of `cryptography`, and of vectors made to be hard."""

from __future__ import annotations

import os

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.shipping.signatures import p256
from tests.shipping.signatures.made_signatures import (
    MESSAGE,
    Vector,
    encoded,
    finite,
    made_vectors,
    multiply,
    other_encodings,
    signed_with,
)

EXAMPLES = 40 if os.environ.get("MOEC_FULL_GATES") != "1" else 5000
ALGORITHM = ec.ECDSA(hashes.SHA256())
VECTORS = list(made_vectors())
SMALL = next(vector for vector in VECTORS if vector.name == "r is small")
SECRET = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
"""Key of RFC 6979, A.2.5."""
RFC_KEY = (
    0x60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6,
    0x7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299,
)
RFC_SIGNATURES = {
    b"sample": (
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    ),
    b"test": (
        0xF1ABB023518351CD71D881567B1EA663ED3EFCF6C5132B354F28D3B0B7D38367,
        0x019F4113742A2B14BD25926B49C649155F267E60D3814B4C0CC84250E46F0083,
    ),
}


def verdict_of_cryptography(key: tuple[int, int], message: bytes, signature: bytes) -> bool:
    try:
        ec.EllipticCurvePublicNumbers(*key, ec.SECP256R1()).public_key().verify(signature, message, ALGORITHM)
    except InvalidSignature:
        return False
    return True


@pytest.mark.gate("G14")
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_made_signatures(vector: Vector) -> None:
    assert p256.is_signature(vector.key, MESSAGE, vector.signature) is vector.is_valid
    assert verdict_of_cryptography(vector.key, MESSAGE, vector.signature) is vector.is_valid


@pytest.mark.gate("G14")
@pytest.mark.parametrize("vector", [VECTORS[0], SMALL], ids=lambda vector: vector.name)
@pytest.mark.parametrize("name", list(other_encodings(VECTORS[0].signature)))
def test_der_has_one_encoding(name: str, vector: Vector) -> None:
    """Also where the numbers are small, and the length alone shows nothing."""
    signature = other_encodings(vector.signature)[name]
    assert not p256.is_signature(vector.key, MESSAGE, signature)
    assert p256.decode_signature(signature) is None
    assert not verdict_of_cryptography(vector.key, MESSAGE, signature)


def test_published_signatures() -> None:
    assert multiply(SECRET, p256.GENERATOR) == RFC_KEY
    for message, numbers in RFC_SIGNATURES.items():
        assert p256.is_signature(RFC_KEY, message, encoded(*numbers))
        assert not p256.is_signature(RFC_KEY, message + b".", encoded(*numbers))


@pytest.mark.gate("G14")
@pytest.mark.parametrize(
    "key",
    [
        (0, 0),
        (1, 1),
        (p256.GENERATOR[0], p256.GENERATOR[1] + 1),
        (p256.GENERATOR[0] + p256.P, p256.GENERATOR[1]),
        (p256.GENERATOR[0], p256.GENERATOR[1] - p256.P),
        (p256.P, p256.P),
        (-1, p256.GENERATOR[1]),
    ],
)
def test_points_off_the_curve_are_no_keys(key: tuple[int, int]) -> None:
    assert not p256.is_on_curve(key)
    assert not p256.is_signature(key, MESSAGE, VECTORS[0].signature)


@pytest.mark.gate("G14")
def test_coordinates_out_of_range_are_no_key() -> None:
    """Modulo P they are those of the key that signed."""
    x, y = VECTORS[0].key
    for key in ((x + p256.P, y), (x, y + p256.P), (x - p256.P, y), (x, y - p256.P)):
        assert not p256.is_signature(key, MESSAGE, VECTORS[0].signature)


def test_the_constants_are_those_of_the_curve() -> None:
    numbers = ec.derive_private_key(1, ec.SECP256R1()).public_key().public_numbers()
    assert (numbers.x, numbers.y) == p256.GENERATOR and p256.is_on_curve(p256.GENERATOR)
    assert multiply(p256.N - 1, p256.GENERATOR) == (numbers.x, p256.P - numbers.y)
    assert pow(2, p256.N - 1, p256.N) == pow(2, p256.P - 1, p256.P) == 1


def test_the_largest_numbers_have_the_largest_encoding() -> None:
    assert len(encoded(p256.N - 1, p256.N - 1)) == p256.MAX_SIGNATURE_BYTES
    assert p256.decode_signature(encoded(p256.N - 1, 1)) == (p256.N - 1, 1)
    assert p256.decode_signature(encoded(0, 127)) == (0, 127)


@settings(max_examples=EXAMPLES)
@given(st.integers(1, p256.N - 1), st.binary(max_size=200))
def test_signatures_of_cryptography_are_accepted(secret: int, message: bytes) -> None:
    private = ec.derive_private_key(secret, ec.SECP256R1())
    numbers = private.public_key().public_numbers()
    signature = private.sign(message, ALGORITHM)
    assert p256.is_signature((numbers.x, numbers.y), message, signature)
    assert not p256.is_signature((numbers.x, numbers.y), message + b"\0", signature)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_changed_signatures_get_the_verdict_of_cryptography(data: st.DataObject) -> None:
    """A few bytes change, appear or disappear."""
    changed = bytearray(VECTORS[0].signature)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "remove"]))
        if kind == "remove":
            del changed[place]
        elif kind == "insert":
            changed.insert(place, data.draw(st.integers(0, 255)))
        else:
            changed[place] = data.draw(st.integers(0, 255))
    key, signature = VECTORS[0].key, bytes(changed)
    assert p256.is_signature(key, MESSAGE, signature) == verdict_of_cryptography(key, MESSAGE, signature)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 1 << 257), st.integers(0, 1 << 257))
def test_any_two_numbers_get_the_verdict_of_cryptography(r: int, s: int) -> None:
    key, signature = VECTORS[0].key, encoded(r, s)
    assert p256.is_signature(key, MESSAGE, signature) == verdict_of_cryptography(key, MESSAGE, signature)


@settings(max_examples=EXAMPLES // 10)
@given(st.integers(1, p256.N - 1), st.integers(1, p256.N - 1))
def test_the_fast_sum_is_the_slow_one(secret: int, nonce: int) -> None:
    r, s = signed_with(secret, nonce)
    assert p256.is_signature(finite(multiply(secret, p256.GENERATOR)), MESSAGE, encoded(r, s))
