"""Elementary functions with one defined result on every machine.

The functions of numpy and of the C library differ in last bits between processors. `exp` is the one of the extension,
with the same bits on all instruction sets. The others take steps that IEEE 754 defines to the last bit: sums, products,
quotients, and exact scalings by powers of two, in float64. They are for tables and for few values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .extension import compiled

_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
"""ln 2 in two parts; the first has 32 bits, so its products with exponents are exact."""
_HALF_PI = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
"""pi / 2 in three parts; the first two have at most 33 bits, so their products with up to 2^20 are exact."""
_NEAR_QUARTERS = 2**20
_HALF_PI_FAR = (
    float.fromhex("0x1.921fb4p+0"),
    float.fromhex("0x1.4442dp-24"),
    float.fromhex("0x1.846988p-48"),
    float.fromhex("0x1.8cc51701b839ap-72"),
)
"""pi / 2 in four parts; the first three have at most 24 bits, for larger numbers of quarter turns."""
_AT_ONCE = 16_384
"""Angles whose steps stay in the processor's cache."""
_SQRT_HALF = math.sqrt(0.5)
_INVERSE_LN2 = float.fromhex("0x1.71547652b82fep+0")
_INVERSE_HALF_PI = float.fromhex("0x1.45f306dc9c883p-1")


def exp(x: np.ndarray) -> np.ndarray:
    """Return e^x, float32 of the same shape. Relative error at most 2e-7; -inf gives 0.

    x: float32.
    """
    native = compiled()
    if native is None:
        return np.asarray(np.exp(x), np.float32)
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty_like(flat)
    native.exp(flat, out)
    return out.reshape(x.shape)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x), float32 of the same shape.

    x: float32.
    """
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(1) / (np.float32(1) + exp(-x)), np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    """Return x / (1 + e^-x), float32 of the same shape.

    x: float32.
    """
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1) + exp(-x)), np.float32)


def softcapped(x: np.ndarray, bound: float) -> np.ndarray:
    """Return bound * tanh(x / bound), float32 of the same shape. The result is new.

    x: float32.
    """
    with np.errstate(over="ignore"):
        turned = exp(x * np.float32(-2 / bound))
    return np.asarray(np.float32(2 * bound) / (np.float32(1) + turned) - np.float32(bound), np.float32)


def softplus(x: np.ndarray) -> np.ndarray:
    """Return ln(1 + e^x), float32 of the same shape. Relative error at most 3e-7.

    With y = e^-|x|, it is max(x, 0) + ln(1 + y), and ln(1 + y) the power series of 2 atanh(y / (2 + y)) in float64.
    x: float32.
    """
    y = exp(-np.abs(x)).astype(np.float64)
    s = y / (2 + y)
    series = _polynomial(s * s, [1 / (2 * k + 1) for k in range(9)])
    return np.asarray(np.where(x < 0, np.float32(0), x) + 2 * s * series, np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    """Return e^x / sum(e^x) over the last axis, float32 of the same shape.

    x: float32. The largest of a row is finite.
    """
    shares = exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True), np.float32)


def natural_log(x: np.ndarray | float) -> np.ndarray:
    """Return ln x, float64 of the same shape. Relative error at most 4e-16, absolute near 1.

    x is 2^e m, and ln m is the power series of 2 atanh((m - 1) / (m + 1)).

    x: positive and finite.
    """
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    is_small = mantissa < _SQRT_HALF
    mantissa = np.where(is_small, 2 * mantissa, mantissa)
    exponent = (exponent - is_small).astype(np.float64)
    s = (mantissa - 1) / (mantissa + 1)
    series = _polynomial(s * s, [1 / (2 * k + 1) for k in range(13)])
    return np.asarray(exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2 * s * series))


def power(base: float, exponents: np.ndarray) -> np.ndarray:
    """Return base^y, float64. Relative error at most 1e-14 for results from 1e-30 to 1e30.

    y ln base = n ln 2 + r with |r| <= ln 2 / 2, and e^r is a Taylor polynomial of degree 13.
    base: positive.
    exponents: y, float64.
    """
    x = np.asarray(exponents, np.float64) * natural_log(base)
    n = np.rint(x * _INVERSE_LN2)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = _polynomial(r, [1 / math.factorial(k) for k in range(14)])
    return np.asarray(np.ldexp(series, n.astype(np.int32)))


def sine_cosine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sin x and cos x, rounded to float32, of the same shape.

    x: float32, at most 2^29 in magnitude, which no position exceeds.
    """
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty((2, len(flat)), np.float32)
    for start in range(0, len(flat), _AT_ONCE):
        chunk = slice(start, start + _AT_ONCE)
        out[0, chunk], out[1, chunk] = _sine_cosine(flat[chunk].astype(np.float64))
    return out[0].reshape(x.shape), out[1].reshape(x.shape)


def _sine_cosine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sin x and cos x, float64. Absolute error at most 4e-16.

    x = k pi / 2 + r with |r| <= pi / 4. Both functions of r are Taylor polynomials, of degrees 17 and 16.
    """
    k = np.rint(x * _INVERSE_HALF_PI)
    r = x
    for term in _HALF_PI:
        r = r - k * term
    is_far = np.abs(k) > _NEAR_QUARTERS
    if is_far.any():
        far = x
        for term in _HALF_PI_FAR:
            far = far - k * term
        r = np.where(is_far, far, r)
    squared = r * r
    sine = r * _polynomial(squared, [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)])
    cosine = _polynomial(squared, [(-1) ** n / math.factorial(2 * n) for n in range(9)])
    quarter = k.astype(np.int64) & 3
    swapped = (quarter & 1).astype(bool)
    sine, cosine = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    return np.where(quarter >= 2, -sine, sine), np.where((quarter == 1) | (quarter == 2), -cosine, cosine)


def _polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """Return the polynomial of x by Horner's rule. coefficients: lowest degree first."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
