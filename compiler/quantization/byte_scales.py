"""Scales and minima as bytes, multiples of a power of two that every row has of its own.

Both stay half-precision values in a QuantizedMatrix, which holds every one of them exactly; the packer finds bytes and
exponents again. Rows stand alone, so that a matrix may take each of its rows from another one.
Shapes: N rows, G groups. Source: docs/format.md, Packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.manifests.quant import BYTE_SCALES_EXPONENTS

LARGEST_BYTE = 255
EXPONENT_BIAS = 127
_BITS = 8


def on_bytes(scales: Tensor, minima: Tensor, largest_code: int) -> tuple[Tensor, Tensor]:
    """The nearest scales and minima that bytes can say, float16 [N, G] each; minima above 0 give way to wider scales.

    scales: [N, G] >= 0. minima: [N, G].
    """
    above = minima.float().clamp_min(0)
    wide, low = scales.float() + above / largest_code, minima.float().clamp_max(0)
    return _nearest(wide).half(), -_nearest(-low).half()


def exponents(values: Tensor) -> Tensor:
    """The exponent e of every row's step 2^e: the least with which no byte is above 255. [N, G] >= 0 -> int32 [N]."""
    largest = values.float().amax(1)
    ends = torch.frexp(largest).exponent - _BITS  # largest < 2^8 x 2^e
    is_above = torch.ldexp(torch.full_like(largest, LARGEST_BYTE), ends) < largest
    low, high = (stored - EXPONENT_BIAS for stored in BYTE_SCALES_EXPONENTS)
    return torch.where(largest > 0, ends + is_above, low).clamp_(low, high)


def bytes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """What `on_bytes` gave: bytes uint8 [N, G] and stored exponents uint8 [N]. Raises ValueError for other values."""
    steps = exponents(values)
    found = torch.ldexp(values.float(), -steps.unsqueeze(1))
    if not bool(((found >= 0) & (found <= LARGEST_BYTE) & (found == found.round())).all()):
        raise ValueError("scales and minima: expected multiples of one power of two in each row, up to 255 times it")
    return found.to(torch.uint8), (steps + EXPONENT_BIAS).to(torch.uint8)


def _nearest(values: Tensor) -> Tensor:
    """Values >= 0 rounded to bytes of their row's step, float32."""
    steps = exponents(values).unsqueeze(1)
    return torch.ldexp(torch.ldexp(values, -steps).round_().clamp_max_(LARGEST_BYTE), steps)
