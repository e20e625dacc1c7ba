"""Verify ECDSA signatures over NIST P-256 with SHA-256, with the standard library alone.

No secret is handled, so the time of a computation tells an attacker nothing. Devices verify with this file even where
`cryptography` is installed: one implementation gives one verdict everywhere, and a signature takes some milliseconds.
Sources: FIPS 186-5 section 6.4.2 (verification), SP 800-186 section 3.2.1.3 (curve), SEC 1 section 2.2 (addition).
"""

from __future__ import annotations

import hashlib

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
"""Prime of the field. The curve is y^2 = x^3 - 3 x + B."""
N = 0xFFFFFFFF_00000000_FFFFFFFF_FFFFFFFF_BCE6FAAD_A7179E84_F3B9CAC2_FC632551
"""Number of points, a prime."""
B = 0x5AC635D8_AA3A93E7_B3EBBD55_769886BC_651D06B0_CC53B0F6_3BCE3C3E_27D2604B
GENERATOR = (
    0x6B17D1F2_E12C4247_F8BCE6E5_63A440F2_77037D81_2DEB33A0_F4A13945_D898C296,
    0x4FE342E2_FE1A7F9B_8EE7EB4A_7C0F9E16_2BCE3357_6B315ECE_CBB64068_37BF51F5,
)
BYTES = 32
"""Size of a coordinate, bytes."""
MAX_SIGNATURE_BYTES = 72
"""Size of the longest DER signature: 2 bytes, then two integers of 2 + 33 bytes."""
_SEQUENCE, _INTEGER = 0x30, 0x02

Affine = tuple[int, int]
_Jacobian = tuple[int, int, int]
"""The point (X / Z^2, Y / Z^3). Z is 0 for the point at infinity."""
_INFINITY: _Jacobian = (1, 1, 0)


def is_on_curve(point: Affine) -> bool:
    """Return whether both coordinates are in 0 to P - 1 and satisfy the equation of the curve.

    The number of points is prime, so such a point generates all of them. The point at infinity has no coordinates.
    """
    x, y = point
    return 0 <= x < P and 0 <= y < P and (y * y - x * x * x + 3 * x - B) % P == 0


def is_signature(public_key: Affine, message: bytes, signature: bytes) -> bool:
    """Return whether a signature over a message was made with the private half of a key.

    A signature with the larger of the two possible values of s is accepted, as by other implementations.
    public_key: point on the curve.
    signature: DER of the integers r and s, in the one encoding that DER allows.
    """
    numbers = decode_signature(signature)
    if numbers is None or not is_on_curve(public_key):
        return False
    r, s = numbers
    if not (0 < r < N and 0 < s < N):
        return False
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    inverse = pow(s, -1, N)
    x, _, z = _sum_of_products(digest * inverse % N, GENERATOR, r * inverse % N, public_key)
    if z == 0:
        return False
    return x * pow(z, -2, P) % P % N == r


def decode_signature(data: bytes) -> tuple[int, int] | None:
    """Return r and s of a DER signature, or None for every other encoding.

    DER allows one encoding of a number: no needless zero byte, no long form of a length below 128.
    """
    if not 8 <= len(data) <= MAX_SIGNATURE_BYTES or data[0] != _SEQUENCE or data[1] != len(data) - 2:
        return None
    first = _integer(data, 2)
    if first is None:
        return None
    r, start = first
    second = _integer(data, start)
    if second is None:
        return None
    s, end = second
    return (r, s) if end == len(data) else None


def _integer(data: bytes, start: int) -> tuple[int, int] | None:
    """Return the non-negative DER integer at `start` and the position after it, or None."""
    if start + 3 > len(data) or data[start] != _INTEGER:
        return None
    size = data[start + 1]
    end = start + 2 + size
    content = data[start + 2 : end]
    if not 1 <= size <= BYTES + 1 or end > len(data):
        return None
    is_negative = content[0] >= 0x80
    has_needless_zero = size > 1 and content[0] == 0 and content[1] < 0x80
    if is_negative or has_needless_zero:
        return None
    return int.from_bytes(content, "big"), end


def _sum_of_products(a: int, first: Affine, b: int, second: Affine) -> _Jacobian:
    """Return a * first + b * second. Both products share their doublings (Shamir's trick)."""
    one: _Jacobian = (*first, 1)
    other: _Jacobian = (*second, 1)
    addends = (_INFINITY, one, other, _add(one, other))
    total = _INFINITY
    for bit in reversed(range(max(a.bit_length(), b.bit_length()))):
        total = _double(total)
        chosen = (a >> bit & 1) | (b >> bit & 1) << 1
        if chosen:
            total = _add(total, addends[chosen])
    return total


def _double(point: _Jacobian) -> _Jacobian:
    """Return twice a point. No point has order 2, so y is 0 for none."""
    x, y, z = point
    if z == 0:
        return _INFINITY
    square = y * y % P
    product = 4 * x * square % P
    slope = 3 * (x - z * z) * (x + z * z) % P
    doubled_x = (slope * slope - 2 * product) % P
    doubled_y = (slope * (product - doubled_x) - 8 * square * square) % P
    return doubled_x, doubled_y, 2 * y * z % P


def _add(first: _Jacobian, second: _Jacobian) -> _Jacobian:
    """Return the sum of two points, which may be equal, opposite or at infinity."""
    x1, y1, z1 = first
    x2, y2, z2 = second
    if z1 == 0:
        return second
    if z2 == 0:
        return first
    square1, square2 = z1 * z1 % P, z2 * z2 % P
    left, right = x1 * square2 % P, x2 * square1 % P
    top, bottom = y1 * square2 * z2 % P, y2 * square1 * z1 % P
    width, height = (right - left) % P, (bottom - top) % P
    if width == 0:
        return _double(first) if height == 0 else _INFINITY
    width2 = width * width % P
    width3 = width2 * width % P
    middle = left * width2 % P
    x = (height * height - width3 - 2 * middle) % P
    y = (height * (middle - x) - top * width3) % P
    return x, y, z1 * z2 * width % P
