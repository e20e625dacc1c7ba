"""ECDSA over P-256 with the standard library gives the verdicts of `cryptography`, and of vectors made to be hard.

The vectors are signatures that a signer would not make by chance, each with the key that it fits. A signature (r, s)
over a message with digest e fits the key Q if r is the x, mod n, of R = (e / s) G + (r / s) Q. So for any R, s and
message there is a key Q = (s / r) R - (e / r) G. The arithmetic here is affine and slow, and shares nothing with
`p256.py` but the constants.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.shipping.signatures import p256

Point = tuple[int, int] | None
"""None: the point at infinity."""
MESSAGE = b"a message"


@dataclass(frozen=True)
class Vector:
    """A key, a signature over MESSAGE, and the verdict."""

    name: str
    key: tuple[int, int]
    signature: bytes
    is_valid: bool


def add(first: Point, second: Point) -> Point:
    if first is None or second is None:
        return second if first is None else first
    (x1, y1), (x2, y2) = first, second
    if x1 == x2 and (y1 + y2) % p256.P == 0:
        return None
    rise, run = (3 * x1 * x1 - 3, 2 * y1) if first == second else (y2 - y1, x2 - x1)
    slope = rise * pow(run, -1, p256.P)
    x = (slope * slope - x1 - x2) % p256.P
    return x, (slope * (x1 - x) - y1) % p256.P


def multiply(factor: int, point: Point) -> Point:
    total: Point = None
    for bit in bin(factor % p256.N)[2:]:
        total = add(total, total)
        if bit == "1":
            total = add(total, point)
    return total


def finite(point: Point) -> tuple[int, int]:
    if point is None:
        raise ValueError("expected a point with coordinates")
    return point


def point_at(x: int) -> tuple[int, int]:
    """Return the point with the first x from here on that has one."""
    while True:
        square = (x**3 - 3 * x + p256.B) % p256.P
        y = pow(square, (p256.P + 1) // 4, p256.P)
        if y * y % p256.P == square:
            return x, y
        x += 1


def integer(number: int) -> bytes:
    """Return a DER integer, also of a negative number."""
    size = number.bit_length() // 8 + 1
    return bytes([2, size]) + number.to_bytes(size, "big", signed=True)


def encoded(r: int, s: int) -> bytes:
    content = integer(r) + integer(s)
    return bytes([0x30, len(content)]) + content


def digest_of(message: bytes) -> int:
    return int.from_bytes(hashlib.sha256(message).digest(), "big")


def key_for(nonce_point: tuple[int, int], s: int) -> tuple[int, int]:
    """Return the key for which (x of the point mod n, s) is a signature over MESSAGE."""
    inverse = pow(nonce_point[0] % p256.N, -1, p256.N)
    left = multiply(s * inverse, nonce_point)
    right = multiply(-digest_of(MESSAGE) * inverse, p256.GENERATOR)
    return finite(add(left, right))


def signed_with(secret: int, nonce: int = 12345) -> tuple[int, int]:
    """Return the signature over MESSAGE by the textbook."""
    r = finite(multiply(nonce, p256.GENERATOR))[0] % p256.N
    return r, pow(nonce, -1, p256.N) * (digest_of(MESSAGE) + r * secret) % p256.N


MADE_SECRET = 987654321
KEY = finite(multiply(MADE_SECRET, p256.GENERATOR))


def made_vectors() -> Iterator[Vector]:
    """Yield signatures with numbers at the ends of their ranges, and keys at the special points of the addition."""
    yield from _numbers_out_of_range()
    yield from _points_at_the_ends()
    yield from _zeros_of_der()
    yield from _special_keys()


def _numbers_out_of_range() -> Iterator[Vector]:
    """A signature that is valid, and pairs of numbers next to it."""
    n = p256.N
    r, s = signed_with(MADE_SECRET)
    yield Vector("textbook", KEY, encoded(r, s), True)
    yield Vector("the other s", KEY, encoded(r, n - s), True)
    for name, pair in {
        "r is 0": (0, s),
        "s is 0": (r, 0),
        "both are 0": (0, 0),
        "r is n": (n, s),
        "s is n": (r, n),
        "r is 1, s is 1": (1, 1),
        "s is larger by n": (r, s + n),
        "r is negative": (r - n, s),
        "s is negative": (r, s - n),
        "both change places": (s, r),
        "s is -1": (r, -1),
        "r is p": (p256.P, s),
    }.items():
        yield Vector(name, KEY, encoded(*pair), False)


def _points_at_the_ends() -> Iterator[Vector]:
    """Signatures whose nonce has a point with an x that is large or small, or whose s is at an end."""
    n = p256.N
    # An x between n and p is larger than r: x mod n has to be compared.
    large = point_at(n)
    large_key = key_for(large, 77)
    yield Vector("x is at least n", large_key, encoded(large[0] - n, 77), True)
    yield Vector("r is x, at least n", large_key, encoded(large[0], 77), False)
    small = point_at(1)
    small_key = key_for(small, 77)
    yield Vector("r is small", small_key, encoded(small[0], 77), True)
    yield Vector("r is small, and larger by n", small_key, encoded(small[0] + n, 77), False)

    for name, number in {"s is 1": 1, "s is n - 1": n - 1, "s is a power of two": 1 << 255}.items():
        nonce_point = finite(multiply(4242, p256.GENERATOR))
        yield Vector(name, key_for(nonce_point, number), encoded(nonce_point[0] % n, number), True)


def _zeros_of_der() -> Iterator[Vector]:
    """A number of 32 bytes whose first bit is set has a zero before it. Without the zero it is negative."""
    nonce = next(nonce for nonce in range(1, 99) if min(signed_with(MADE_SECRET, nonce)) >> 255)
    high = encoded(*signed_with(MADE_SECRET, nonce))
    yield Vector("both numbers need a zero", KEY, high, True)
    yield Vector("r lacks its zero", KEY, bytes([0x30, 69, 2, 32]) + high[5:], False)
    yield Vector("s lacks its zero", KEY, bytes([0x30, 69]) + high[2:37] + bytes([2, 32]) + high[40:], False)


def _special_keys() -> Iterator[Vector]:
    n = p256.N
    # The sum is the point at infinity, which has no x.
    infinite = finite(multiply(-digest_of(MESSAGE) * pow(5, -1, n), p256.GENERATOR))
    yield Vector("the sum is at infinity", infinite, encoded(5, 9), False)

    # The table of the two factors holds a doubled point, or the point at infinity.
    for name, special in {
        "the key is G": 1,
        "the key is -G": n - 1,
        "the key is 2 G": 2,
        "the key is -2 G": n - 2,
    }.items():
        yield Vector(name, finite(multiply(special, p256.GENERATOR)), encoded(*signed_with(special)), True)
        wrong_r, wrong_s = signed_with(special)
        yield Vector(
            f"{name}, wrong s", finite(multiply(special, p256.GENERATOR)), encoded(wrong_r, wrong_s + 1), False
        )


def other_encodings(signature: bytes) -> dict[str, bytes]:
    """Return encodings of the same two numbers, and of nearly the same, that DER does not allow."""
    r_end = 4 + signature[3]
    first, second = signature[2:r_end], signature[r_end:]

    def sequence(content: bytes) -> bytes:
        return bytes([0x30, len(content)]) + content

    def padded(number: bytes) -> bytes:
        return bytes([2, number[1] + 1, 0]) + number[2:]

    return {
        "nothing": b"",
        "one byte": b"\x30",
        "an empty sequence": b"\x30\0",
        "zeros": bytes(len(signature)),
        "a byte after the end": signature + b"\0",
        "cut by a byte": signature[:-1],
        "a length that is too large": bytes([0x30, signature[1] + 1]) + signature[2:],
        "a length that is too small": bytes([0x30, signature[1] - 1]) + signature[2:],
        "a length in long form": bytes([0x30, 0x81, signature[1]]) + signature[2:],
        "a length in longer form": bytes([0x30, 0x82, 0, signature[1]]) + signature[2:],
        "an indefinite length": b"\x30\x80" + signature[2:] + b"\0\0",
        "a set": b"\x31" + signature[1:],
        "another tag of r": sequence(b"\x03" + first[1:] + second),
        "another tag of s": sequence(first + b"\x0a" + second[1:]),
        "a needless zero in r": sequence(padded(first) + second),
        "a needless zero in s": sequence(first + padded(second)),
        "two needless zeros": sequence(padded(padded(first)) + second),
        "r without bytes": sequence(b"\2\0" + second),
        "s without bytes": sequence(first + b"\2\0"),
        "r alone": sequence(first),
        "three numbers": sequence(first + second + b"\2\1\1"),
        "a null after s": sequence(first + second + b"\5\0"),
        "r with a length in long form": sequence(bytes([2, 0x81, first[1]]) + first[2:] + second),
        "r reaches over the end": sequence(bytes([2, 0x7F]) + first[2:] + second),
        "s reaches over the end": sequence(first + bytes([2, second[1] + 1]) + second[2:]),
        "r and s as plain numbers": first[-32:] + second[-32:],
        "a sequence in a sequence": sequence(signature),
        "a needless zero, and the end": sequence(first + b"\2\2\0"),
        "r of 40 bytes": sequence(bytes([2, 40, 1]) + bytes(7) + first[-32:] + second),
    }


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
