"""One quantized matrix in plain form, between the quantizers and the packer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moec.manifests.quant import PRUNED, QuantSpec

from ..checkpoint.mxfp4 import values as mxfp4_values


class RangeExceeded(ValueError):
    """A matrix whose values exceed the range of a format's scales. A search does not offer it that format."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Codes with their scales. Quantizers return it, and the packer stores it.

    codes: uint8 [N, K], at most `spec.largest_code`.
    scales: float16 [N, G], finite. mxfp4: exponents, uint8 [N, G].
    minima: float16 [N, G], or None for symmetric formats and mxfp4.

    Byte scales are float16 numbers as `byte_scales.py` makes them, with minima of at most 0.
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
