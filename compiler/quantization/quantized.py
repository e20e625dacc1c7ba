"""One quantized matrix in plain form, between the quantizers and the packer.

Byte scales are scales and minima as multiples of a power of two. Each row has its own power. A QuantizedMatrix keeps
both as float16 values, which hold these multiples exactly. The packer recovers bytes and exponents from them. Rows are
independent, so a matrix can be assembled from rows of several candidates.
Shapes: N rows, K columns, G groups. Source: docs/format.md, Packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moec.manifests.quant import BYTE_SCALES_EXPONENTS, PRUNED, QuantSpec

from ..checkpoint.mxfp4 import values as mxfp4_values

LARGEST_BYTE = 255
EXPONENT_BIAS = 127
_BITS = 8


class RangeExceeded(ValueError):
    """A matrix whose values exceed the range of a format's scales. A search does not offer it that format."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Codes with their scales. Quantizers return it, and the packer stores it.

    codes: uint8 [N, K], at most `spec.largest_code`.
    scales: float16 [N, G], finite. mxfp4: exponents, uint8 [N, G].
    minima: float16 [N, G], or None for symmetric formats and mxfp4.

    Byte scales are float16 numbers as `on_bytes` makes them, with minima of at most 0.
    A matrix of a pruned expert has no columns: K and G are 0.
    The weight is scale * code + minimum, computed in float32 from the float16 values (docs/format.md, Packing).
    A quantizer must therefore round scales and minima to float16 before it chooses codes.
    """

    spec: QuantSpec
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def rows(self, start: int, end: int) -> QuantizedMatrix:
        """Return some of the rows, without copying them."""
        minima = None if self.minima is None else self.minima[start:end]
        return QuantizedMatrix(self.spec, self.codes[start:end], self.scales[start:end], minima)

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Return the matrix on a device."""
        minima = None if self.minima is None else self.minima.to(device)
        return QuantizedMatrix(self.spec, self.codes.to(device), self.scales.to(device), minima)

    def dequantize(self) -> torch.Tensor:
        """Return the weights that the runtime computes with, float32 [N, K]."""
        rows, columns = self.codes.shape
        groups = self.scales.shape[1]
        if self.spec.is_pruned:
            return torch.empty(rows, 0)
        if self.spec.is_mxfp4:
            return mxfp4_values(self.codes.reshape(rows, groups, -1), self.scales).reshape(rows, columns)
        scales = self.scales.float().unsqueeze(-1)
        minima = -scales * float(self.spec.centre) if self.minima is None else self.minima.float().unsqueeze(-1)
        grouped = self.codes.reshape(rows, groups, columns // groups).float()
        return torch.addcmul(minima, grouped, scales).reshape(rows, columns)


LEFT_OUT = QuantSpec(PRUNED)
"""Format of a pruned expert."""


def left_out(rows: int) -> QuantizedMatrix:
    """Return a matrix of a pruned expert: rows without columns."""
    nothing = torch.empty(rows, 0)
    return QuantizedMatrix(LEFT_OUT, nothing.to(torch.uint8), nothing.half(), None)


def to_half(values: Tensor) -> Tensor:
    """Round to float16. Raises RangeExceeded beyond its range."""
    half = values.half().contiguous()
    if not torch.isfinite(half).all():
        raise RangeExceeded(f"scales up to {float(values.abs().max()):.3g} exceed float16")
    return half


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
