"""MXFP4 matrices: 4-bit floats in blocks of 32 that share a power of two. Checkpoints and bundles use the same form.

Source: OCP Microscaling Formats Specification 1.0, sections 5.1 and 5.3.3 (FP4 E2M1, E8M0 scales).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weight_files import MXFP4_BLOCK_VALUES

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_NAN_SCALE = 255
_ZERO_SCALE = _SCALE_BIAS  # scale of a block of zeros
_EXPONENTS_TRIED = 5


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the exact values, bfloat16 [N, 32 B].

    blocks: uint8 [N, B, 16], the lower half of a byte first.
    scales: uint8 [N, B]. A scale of 255 (NaN) gives NaN. Scales beyond bfloat16's exponents give infinities or zeros.
    """
    decoded = torch.where((scales == _NAN_SCALE).unsqueeze(-1), torch.nan, values(codes_of(blocks), scales))
    return decoded.flatten(1).to(torch.bfloat16)


def codes_of(packed: Tensor) -> Tensor:
    """Return the codes in bytes, uint8 [.., B] -> [.., 2 B], the lower half of a byte first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def floats(codes: Tensor) -> Tensor:
    """Return the numbers of codes below 16, before their scale, float32."""
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=codes.device)
    return table[codes.long()]


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes and exponents, float32 [N, B, 32].

    codes: uint8 [N, B, 32], below 16.
    scales: uint8 [N, B].
    """
    return torch.ldexp(floats(codes), (scales.to(torch.int32) - _SCALE_BIAS).unsqueeze(-1))


def encode(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return codes uint8 [N, K] and scales uint8 [N, K / 32] that give exactly these floats [N, K], or None if none do.

    Of several exponents that can hold a block, the least is taken. `decode` of the result returns the same floats.
    Nonzero blocks below 2**-126 are refused, because kernels would flush them to zero.
    """
    blocks = weight.float().reshape(len(weight), -1, MXFP4_BLOCK_VALUES)
    largest = blocks.abs().amax(-1)
    table = torch.tensor(_MAGNITUDES, device=weight.device)
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    scales = torch.full_like(largest, _ZERO_SCALE, dtype=torch.uint8)
    undecided = largest > 0
    # The largest magnitude of a block is one of seven values. A few exponents can hold it; the least is tried first.
    least = torch.frexp(largest).exponent + (_SCALE_BIAS - 3)
    for more in range(_EXPONENTS_TRIED):
        exponent = least + more
        scaled = torch.ldexp(blocks, (_SCALE_BIAS - exponent).unsqueeze(-1))
        nearest = torch.bucketize(scaled.abs(), table)
        nearest = nearest.clamp_max_(len(_MAGNITUDES) - 1)
        exact = (table[nearest] == scaled.abs()).all(-1) & (exponent >= 2) & (exponent < _NAN_SCALE) & undecided
        signed = nearest.to(torch.uint8) + (8 * torch.signbit(blocks)).to(torch.uint8)
        codes = torch.where(exact.unsqueeze(-1), signed, codes)
        scales = torch.where(exact, exponent.to(torch.uint8), scales)
        undecided = undecided & ~exact
    if bool(undecided.any()):
        return None
    return codes.reshape(weight.shape), scales
