"""Scales and minima as bytes: multiples of a power of two. Each row has its own power.

A QuantizedMatrix keeps both as float16 values, which hold these multiples exactly. The packer recovers bytes and
exponents from them. Rows are independent, so a matrix can be assembled from rows of several candidates.
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
    """Return the nearest scales and minima that bytes can hold, float16 [N, G] each.

    A minimum above 0 becomes 0, and its scale grows so that the group's largest weight is still covered.
    scales: [N, G] >= 0.
    minima: [N, G].
    """
    above = minima.float().clamp_min(0)
    wide, low = scales.float() + above / largest_code, minima.float().clamp_max(0)
    return _nearest(wide).half(), -_nearest(-low).half()


def exponents(values: Tensor) -> Tensor:
    """Return the exponent e of each row's step 2^e, int32 [N]: the least for which no byte exceeds 255.

    values: [N, G] >= 0.
    """
    largest = values.float().amax(1)
    ends = torch.frexp(largest).exponent - _BITS  # largest < 2^8 x 2^e
    is_above = torch.ldexp(torch.full_like(largest, LARGEST_BYTE), ends) < largest
    low, high = (stored - EXPONENT_BIAS for stored in BYTE_SCALES_EXPONENTS)
    return torch.where(largest > 0, ends + is_above, low).clamp_(low, high)


def bytes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of the result of `on_bytes`, uint8 [N, G], and the stored exponents, uint8 [N].

    Raises ValueError for other values.
    """
    steps = exponents(values)
    multiples = torch.ldexp(values.float(), -steps.unsqueeze(1))
    if not bool(((multiples >= 0) & (multiples <= LARGEST_BYTE) & (multiples == multiples.round())).all()):
        raise ValueError("scales and minima: expected multiples of one power of two in each row, up to 255 times it")
    return multiples.to(torch.uint8), (steps + EXPONENT_BIAS).to(torch.uint8)


def _nearest(values: Tensor) -> Tensor:
    """Round values >= 0 to byte multiples of their row's step, float32."""
    steps = exponents(values).unsqueeze(1)
    return torch.ldexp(torch.ldexp(values, -steps).round_().clamp_max_(LARGEST_BYTE), steps)
