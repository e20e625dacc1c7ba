"""Weights in the blocks of a GGUF file: their values, and the integer codes of the types that have one scale a block.

The `gguf` package computes the values of every type, as llama.cpp does. Blocks of 32 columns; low halves of the bytes
hold the first 16 columns, high halves the others. Source: ggml, ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..integer_codes import CodeNeed, IntegerGrid, IntegerLayout, Parts
from ..packed_weights import LayoutError, PackedWeight

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
"""Types that are read as they are."""
BLOCKS = "blocks"
"""The only part of a weight."""
_BLOCK_COLUMNS = 32
_WEIGHTS_AT_ONCE = 1 << 24
Codes = Callable[[Tensor], Tensor]


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

    integers = None
    if kind in _INTEGERS and len(shape) == 2:
        codes, scales, minima, bits, zero = _INTEGERS[kind]

        def grid(parts: Parts) -> IntegerGrid:
            blocks = _in_blocks(parts[BLOCKS], shape)
            scale = scales(blocks)
            group_of = torch.arange(shape[1]) // _BLOCK_COLUMNS
            least = None if minima is None else minima(blocks)
            return IntegerGrid(bits, torch.full_like(scale, zero), scale, group_of, least)

        zeros = (int(zero), int(zero)) if minima is None else None
        need = CodeNeed(bits, shape[1], _BLOCK_COLUMNS, zeros, has_half_scales=True, has_half_minima=minima is not None)
        integers = IntegerLayout("", lambda parts: codes(_in_blocks(parts[BLOCKS], shape)).flatten(1), grid, need)
    return PackedWeight({BLOCKS: stored}, shape, f"GGUF {kind}", decode, integers, kind == "MXFP4", by_rows=True)


def _values(blocks: Tensor, kind: Any) -> Tensor:
    """Return the values of rows of blocks, float16, a part of the rows at a time."""
    from gguf.quants import dequantize

    step = max(1, _WEIGHTS_AT_ONCE // max(blocks.shape[1], 1))
    rows = [torch.from_numpy(dequantize(part.numpy(), kind)).half() for part in torch.split(blocks, step)]
    return torch.cat(rows)


def _in_blocks(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the blocks of rows, uint8 [N, G, bytes of a block]."""
    return rows.reshape(rows.shape[0], shape[1] // _BLOCK_COLUMNS, -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of each block as float32, [N, G]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the codes of 16 bytes, uint8 [N, G, 32]."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _with_fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return codes of 5 bits, whose fifth bits are four bytes before the others."""
    bits = blocks[..., start : start + 4]
    fifth = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(blocks[..., start + 4 : start + 20]) | (fifth.flatten(-2) << 4)


_INTEGERS: dict[str, tuple[Codes, Codes, Codes | None, int, float]] = {
    "Q4_0": (lambda b: _nibbles(b[..., 2:18]), lambda b: _half(b, 0), None, 4, 8.0),
    "Q4_1": (lambda b: _nibbles(b[..., 4:20]), lambda b: _half(b, 0), lambda b: _half(b, 2), 4, 0.0),
    "Q5_0": (lambda b: _with_fifth_bits(b, 2), lambda b: _half(b, 0), None, 5, 16.0),
    "Q5_1": (lambda b: _with_fifth_bits(b, 4), lambda b: _half(b, 0), lambda b: _half(b, 2), 5, 0.0),
    "Q8_0": (lambda b: b[..., 2:34] ^ 128, lambda b: _half(b, 0), None, 8, 128.0),
}
"""Codes, scales and minima of the blocks of a type, its bits, and its zero."""
