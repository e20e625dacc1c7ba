"""MXFP4 matrices as checkpoints hold them: 4-bit floats in blocks of 32 that share a power of two.

Source: OCP Microscaling Formats Specification 1.0, sections 5.1 and 5.3.3 (FP4 E2M1, E8M0 scales).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_VALUES = 32
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Exact values. blocks: uint8 [N, B, 16], lower half of a byte first; scales: uint8 [N, B]. -> bfloat16 [N, 32 B].

    Scales beyond bfloat16's exponents give infinities or zeros, a scale of 255 (NaN) NaN.
    """
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _SCALE_BIAS
    values = torch.ldexp(table[halves.long()], exponents.unsqueeze(-1))
    values = torch.where((scales == 255).unsqueeze(-1), torch.nan, values)
    return values.flatten(1).to(torch.bfloat16)
