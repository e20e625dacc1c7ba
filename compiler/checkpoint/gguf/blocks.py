"""Weights in the blocks of a GGUF file: their values, and the integer codes of types with one scale for 32 columns.

The `gguf` package computes the values of every type, as llama.cpp does. In blocks of 32 columns low halves of the bytes
hold the first 16 columns, high halves the others. Source: ggml, ggml-common.h and ggml-quants.c.
Shapes: N rows, K columns, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..integer_codes import CodeNeed, IntegerGrid, IntegerLayout, Parts
from ..packed_weights import LayoutError, PackedWeight

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
"""Types that are read as they are."""
MXFP4 = "MXFP4"
BLOCKS = "blocks"
"""The only part of a weight."""
_GROUP = 32  # columns of a scale
_WEIGHTS_AT_ONCE = 1 << 24
Blocks = Callable[[Tensor], Tensor]


def block_weight(stored: str, shape: tuple[int, ...], kind: str) -> PackedWeight:
    """Return a weight of a quantized type.

    stored: the name of its blocks, uint8 [rows, bytes of a row].
    Raises LayoutError if the `gguf` package has no values for the type.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import _type_traits as known

    type_of_block = GGMLQuantizationType[kind]
    if type_of_block not in known:
        raise LayoutError(f"expected a type that the `gguf` package decodes, found {kind}")

    def decode(parts: Parts) -> Tensor:
        return _values(parts[BLOCKS], type_of_block).reshape(-1, *shape[1:])

    integers = None if len(shape) != 2 or kind not in _INTEGERS else _integers(_INTEGERS[kind], shape)
    return PackedWeight({BLOCKS: stored}, shape, f"GGUF {kind}", decode, integers, kind == MXFP4, by_rows=True)


def _integers(kind: _IntegerType, shape: tuple[int, ...]) -> IntegerLayout:
    """Return where the codes of a matrix [N, K] lie in its blocks."""

    def in_blocks(parts: Parts) -> Tensor:
        rows = parts[BLOCKS]
        return rows.reshape(rows.shape[0], shape[1] // kind.columns, -1)

    def grid(parts: Parts) -> IntegerGrid:
        blocks = in_blocks(parts)
        scales = kind.scales(blocks).flatten(1)
        least = None if kind.minima is None else kind.minima(blocks).flatten(1)
        group_of = torch.arange(shape[1]) // _GROUP
        return IntegerGrid(kind.bits, torch.full_like(scales, kind.zero), scales, group_of, least)

    zeros = (kind.zero, kind.zero) if kind.minima is None else None
    has_minima = kind.minima is not None and kind.is_half
    need = CodeNeed(kind.bits, shape[1], _GROUP, zeros, kind.is_half, has_minima, rounds_scales=not kind.is_half)
    return IntegerLayout("", lambda parts: kind.codes(in_blocks(parts)).flatten(1), grid, need)


def _values(blocks: Tensor, kind: Any) -> Tensor:
    """Return the values of rows of blocks, float16 or bfloat16, a part of the rows at a time."""
    from gguf.quants import dequantize

    dtype = torch.bfloat16 if kind.name == MXFP4 else torch.float16
    step = max(1, _WEIGHTS_AT_ONCE // max(blocks.shape[1], 1))
    rows = [torch.from_numpy(dequantize(part.numpy(), kind)).to(dtype) for part in torch.split(blocks, step)]
    return torch.cat(rows)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of each block as float32, [N, B, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the codes of 16 bytes, uint8 [N, B, 32]."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _with_fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return codes of 5 bits, whose fifth bits are four bytes before the others."""
    bits = blocks[..., start : start + 4]
    fifth = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(blocks[..., start + 4 : start + 20]) | (fifth.flatten(-2) << 4)


def _six_bits(blocks: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return the eight scales and the eight minima that take twelve bytes of a block of 256, float32 [N, B, 8] each."""
    first, second, third = torch.split(blocks[..., start : start + 12], 4, -1)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return scales.float(), minima.float()


def _super_scales(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _six_bits(blocks, 4)[0]


def _super_minima(blocks: Tensor) -> Tensor:
    return -_half(blocks, 2) * _six_bits(blocks, 4)[1]


def _super_nibbles(blocks: Tensor, start: int) -> Tensor:
    """Return the codes of 128 bytes, uint8 [N, B, 8, 32]: halves of 32 bytes are two groups."""
    packed = blocks[..., start : start + 128].reshape(*blocks.shape[:-1], 4, 1, 32)
    return torch.cat([packed & 15, packed >> 4], -2).flatten(-3, -2)


def _super_with_fifth_bits(blocks: Tensor) -> Tensor:
    """Return codes of 5 bits. Bit g of 32 bytes belongs to the codes of group g."""
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)) & 1
    return _super_nibbles(blocks, 48) | (fifth << 4)


@dataclass(frozen=True, slots=True)
class _IntegerType:
    """A type whose blocks hold integers. Functions take blocks, uint8 [N, B, bytes of a block].

    columns: of a block.
    codes, scales, minima: of each block, in the order of columns. minima: None if there are none.
    zero: the code of 0 without minima.
    is_half: float16 holds scales and minima. Those of blocks of 256 are products, which it holds to 2^-11.
    """

    columns: int
    codes: Blocks
    scales: Blocks
    minima: Blocks | None
    bits: int
    zero: int = 0
    is_half: bool = True


_INTEGERS = {
    "Q4_0": _IntegerType(32, lambda b: _nibbles(b[..., 2:18]), lambda b: _half(b, 0), None, 4, 8),
    "Q4_1": _IntegerType(32, lambda b: _nibbles(b[..., 4:20]), lambda b: _half(b, 0), lambda b: _half(b, 2), 4),
    "Q5_0": _IntegerType(32, lambda b: _with_fifth_bits(b, 2), lambda b: _half(b, 0), None, 5, 16),
    "Q5_1": _IntegerType(32, lambda b: _with_fifth_bits(b, 4), lambda b: _half(b, 0), lambda b: _half(b, 2), 5),
    "Q8_0": _IntegerType(32, lambda b: b[..., 2:34] ^ 128, lambda b: _half(b, 0), None, 8, 128),
    "Q4_K": _IntegerType(256, lambda b: _super_nibbles(b, 16), _super_scales, _super_minima, 4, is_half=False),
    "Q5_K": _IntegerType(256, _super_with_fifth_bits, _super_scales, _super_minima, 5, is_half=False),
}
