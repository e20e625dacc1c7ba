"""One quantized matrix in plain form, between the quantizers and the packer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moec.manifests.quant import PRUNED, QuantSpec

from ..checkpoint.mxfp4 import values as mxfp4_values


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Codes with their scales: what every quantizer returns and what the packer stores.

    codes: [N, K] uint8, at most `spec.largest_code`. scales: [N, G] float16, finite; of mxfp4 uint8, exponents.
    minima: [N, G] float16, or None in symmetric formats and mxfp4. Byte scales are such half-precision numbers as
    `byte_scales.py` makes, minima at most 0. A matrix that is left out has no columns: K and G are 0.
    The weight is scale * code + minimum, computed in float32 from the float16 values (docs/format.md, Packing),
    so a quantizer must round scales and minima to float16 before it chooses codes.
    """

    spec: QuantSpec
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def dequantize(self) -> torch.Tensor:
        """The weights the runtime computes with. [N, K] float32."""
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
"""The format of an expert that is left out."""


def left_out(rows: int) -> QuantizedMatrix:
    """A matrix of an expert that is left out: rows without columns."""
    nothing = torch.empty(rows, 0)
    return QuantizedMatrix(LEFT_OUT, nothing.to(torch.uint8), nothing.half(), None)
