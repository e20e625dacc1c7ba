"""Weights that a checkpoint stores quantized, decoded one at a time.

Layouts: GPTQ (AutoGPTQ and GPTQModel, both versions of zeros), AWQ (GEMM), NVFP4 of ModelOpt, affine codes of MLX, and
FP8 with one scale per block, row or tensor. Of compressed-tensors: packed integers, 8-bit integers and floats, MXFP4,
NVFP4. The stacks of gpt-oss are read by its family.
Sources: the packages auto-gptq 0.7.1 (qlinear_cuda_old.py), autoawq 0.2.9 (modules/linear/gemm.py and
utils/packing_utils.py) and compressed-tensors 0.19.0 (compressors); the model card of DeepSeek-V3 (weight_scale_inv).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import mxfp4
from .integer_codes import IntegerGrid, IntegerLayout, Parts
from .weight_files import MXFP4_BLOCK_VALUES

_WORD_BITS = 32
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of columns 0 to 7. Source: autoawq, utils/packing_utils.py (AWQ_REVERSE_ORDER)."""
INTEGER_BITS = (4, 8)
_BYTE_BITS, _BYTE_HALF = 8, 128
_NVFP4_VALUES = 16
_ONE = ((), (1,), (1, 1))
"""Shapes of a single number."""
DEFAULT_BLOCK = (128, 128)

_CODES_AT_ONCE = 1 << 22
"""Codes that are unpacked in one step, which takes some 40 bytes for each."""
Shapes = Mapping[str, tuple[int, ...]]


class LayoutError(ValueError):
    """Tensors that fit no known layout. The text tells what was expected and found."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in several tensors.

    names: tensor on disk of each part.
    shape: shape of the weight, [N, K] except in GGUF files.
    precision: the stored precision, for people.
    decode: (parts) -> the weight, float32, or the 16-bit type of the checkpoint.
    integers: the place of its integer codes, None if it has none.
    is_mxfp4: True if it has 4-bit floats in blocks with scales that are powers of two.
    by_rows: True if the rows of the parts are those of the weight, so that some can be decoded alone.
    """

    names: Mapping[str, str]
    shape: tuple[int, ...]
    precision: str
    decode: Callable[[Parts], Tensor]
    integers: IntegerLayout | None = None
    is_mxfp4: bool = False
    by_rows: bool = False


def gptq(names: Mapping[str, str], shapes: Shapes, is_less_one: bool = True) -> PackedWeight:
    """Return a weight in the layout of GPTQ.

    is_less_one: zeros are stored less one, as in version 1 of the format.
    shapes: qweight [K bits / 32, N], scales [G, N], qzeros [G, N bits / 32], g_idx [K] if it exists.
    The number of bits follows from the shapes. Raises LayoutError.
    """
    words, columns = _matrix(shapes, "qweight")
    groups, outputs = _matrix(shapes, "scales")
    zeros = _matrix(shapes, "qzeros")
    bits = next((bits for bits in GPTQ_BITS if zeros == (groups, -(-outputs * bits // _WORD_BITS))), None)
    if columns != outputs or bits is None or not (groups and words and outputs):
        raise LayoutError(
            f"expected `qzeros` [{groups}, {outputs} x 2, 3, 4 or 8 bits] and `qweight` [., {outputs}], "
            f"found {list(zeros)} and {[words, columns]}"
        )
    inputs = words * _WORD_BITS // bits
    order = shapes.get("g_idx")
    if order not in (None, (inputs,)) or (inputs % groups and order is None):
        raise LayoutError(f"expected `g_idx` [{inputs}] for {bits} bits, found {list(order or ())}")

    def grid(parts: Parts) -> IntegerGrid:
        stored = unpack_codes(parts["qzeros"], bits, outputs)  # [G, N]
        zero = (stored + 1) & ((1 << bits) - 1) if is_less_one else stored
        return IntegerGrid(bits, zero.T.float(), parts["scales"].float().T, _groups_of(parts, inputs, groups))

    layout = IntegerLayout("qweight", lambda parts: unpack_codes(parts["qweight"].T, bits, inputs), grid)
    return _of_integers(names, (outputs, inputs), f"GPTQ, {bits} bits", layout)


def _of_integers(
    names: Mapping[str, str], shape: tuple[int, int], precision: str, layout: IntegerLayout
) -> PackedWeight:
    """Return a weight of integer codes."""
    return PackedWeight(names, shape, precision, lambda parts: layout.grid(parts).values(layout.codes(parts)), layout)


def code_less_zero(parts: Parts, packed: PackedWeight) -> tuple[float, float, int]:
    """Return the mean and the variance of (code - stored zero) of a weight in the layout of GPTQ, and its size."""
    outputs, inputs = packed.shape
    bits = parts["qweight"].shape[0] * _WORD_BITS // inputs
    codes = unpack_codes(parts["qweight"].T, bits, inputs).float()
    stored = unpack_codes(parts["qzeros"], bits, outputs)
    if bool((stored == stored.flatten()[0]).all()):  # symmetric: the middle, or one less
        return float(stored.flatten()[0] < 1 << (bits - 1)), 0.0, 1
    of_input = _groups_of(parts, inputs, len(stored))
    return float(codes.mean() - stored.float()[of_input].mean()), float(codes.var()), codes.numel()


def awq(names: Mapping[str, str], shapes: Shapes) -> PackedWeight:
    """Return a weight in the layout of AWQ for matrix products.

    shapes: qweight [K, N / 8], scales [G, N], qzeros [G, N / 8]. Raises LayoutError.
    """
    inputs, words = _matrix(shapes, "qweight")
    groups, outputs = _matrix(shapes, "scales")
    expected = outputs * AWQ_BITS // _WORD_BITS
    is_whole = bool(groups and inputs and outputs) and not (inputs % groups or outputs % len(_AWQ_ORDER))
    if words != expected or _matrix(shapes, "qzeros") != (groups, expected) or not is_whole:
        raise LayoutError(
            f"expected `qweight` [{inputs}, {expected}] and `qzeros` [{groups}, {expected}] of 4 bits, found "
            f"{[inputs, words]} and {list(_matrix(shapes, 'qzeros'))}"
        )

    def grid(parts: Parts) -> IntegerGrid:
        zeros = _awq_codes(parts["qzeros"], outputs).T.float()
        return IntegerGrid(AWQ_BITS, zeros, parts["scales"].float().T, _runs(inputs, groups))

    layout = IntegerLayout("qweight", lambda parts: _awq_codes(parts["qweight"], outputs).T, grid)
    return _of_integers(names, (outputs, inputs), "AWQ, 4 bits", layout)


def packed_integers(names: Mapping[str, str], shapes: Shapes, original: tuple[int, int]) -> PackedWeight:
    """Return a weight in the packed layout of compressed-tensors.

    shapes: weight_packed [N, K bits / 32], weight_scale [N, G], weight_zero_point [N bits / 32, G] and weight_g_idx [K]
        if they exist.
    original: N and K, as `weight_shape` tells. Raises LayoutError.
    """
    rows, columns = original
    words, scales = _matrix(shapes, "weight_packed"), _matrix(shapes, "weight_scale")
    bits = next((bits for bits in INTEGER_BITS if words == (rows, -(-columns * bits // _WORD_BITS))), None)
    groups = scales[1]
    if bits is None or rows < 1 or columns < 1 or scales[0] != rows or not groups or columns % groups:
        raise LayoutError(
            f"expected `weight_packed` [{rows}, {columns} x 4 or 8 bits] and `weight_scale` [{rows}, groups], found "
            f"{list(words)} and {list(scales)}"
        )

    zeros = shapes.get("weight_zero_point")
    packed_rows = -(-rows * bits // _WORD_BITS)
    order = shapes.get("weight_g_idx", (columns,))
    if zeros not in (None, (packed_rows, groups)) or order != (columns,):
        raise LayoutError(
            f"expected `weight_zero_point` [{packed_rows}, {groups}] and `weight_g_idx` [{columns}], found "
            f"{list(zeros or ())} and {list(order)}"
        )

    def grid(parts: Parts) -> IntegerGrid:
        of_column = parts["weight_g_idx"].long() if "weight_g_idx" in parts else None
        if of_column is None or int(of_column.min()) < 0:
            of_column = _runs(columns, groups)
        if int(of_column.max()) >= groups:
            raise LayoutError(f"`weight_g_idx` names a group beyond {groups}")
        zeros = torch.full((rows, groups), float(1 << (bits - 1)))
        if "weight_zero_point" in parts:
            zeros = unpack_codes(parts["weight_zero_point"].T, bits, rows).T.float()
        return IntegerGrid(bits, zeros, parts["weight_scale"].float(), of_column)

    layout = IntegerLayout("weight_packed", lambda parts: unpack_codes(parts["weight_packed"], bits, columns), grid)
    return _of_integers(names, (rows, columns), f"compressed-tensors, {bits} bits", layout)


def affine(names: Mapping[str, str], shapes: Shapes, bits: int) -> PackedWeight:
    """Return a weight in the affine layout of MLX: scale x code + bias.

    shapes: weight [N, K bits / 32], scales and biases [N, G]. Raises LayoutError.
    """
    (rows, words), scales = _matrix(shapes, "weight"), _matrix(shapes, "scales")
    columns, groups = words * _WORD_BITS // bits, scales[1]
    if not rows or not words or not groups or scales != (rows, groups) or columns % groups or words * 32 % bits:
        raise LayoutError(
            f"expected `weight` [rows, columns x {bits} bits] and `scales` [rows, groups], found {[rows, words]} and "
            f"{list(scales)}"
        )
    if shapes["biases"] != scales:
        raise LayoutError(f"expected `biases` {list(scales)}, as the scales, found {list(shapes['biases'])}")

    def grid(parts: Parts) -> IntegerGrid:
        scale = parts["scales"].float()
        return IntegerGrid(bits, torch.zeros_like(scale), scale, _runs(columns, groups), parts["biases"].float())

    layout = IntegerLayout("weight", lambda parts: unpack_codes(parts["weight"], bits, columns), grid)
    return replace(_of_integers(names, (rows, columns), f"MLX, {bits} bits", layout), by_rows=True)


def mxfp4_rows(names: Mapping[str, str], shapes: Shapes) -> PackedWeight:
    """Return a weight of 4-bit floats in the layout of compressed-tensors (`mxfp4-pack-quantized`).

    shapes: weight_packed [N, K / 2], the lower half of a byte first, weight_scale [N, K / 32]. Raises LayoutError.
    """
    (rows, packed), scales = _matrix(shapes, "weight_packed"), _matrix(shapes, "weight_scale")
    half = MXFP4_BLOCK_VALUES // 2
    if not rows or not packed or packed % half or scales != (rows, packed // half):
        raise LayoutError(
            f"expected `weight_packed` [rows, a multiple of {half}] of bytes and `weight_scale` "
            f"[{rows}, {packed // half}], found {[rows, packed]} and {list(scales)}"
        )

    def decode(parts: Parts) -> Tensor:
        return mxfp4.decode(parts["weight_packed"].reshape(rows, -1, half), parts["weight_scale"]).float()

    return PackedWeight(names, (rows, 2 * packed), "compressed-tensors, MXFP4", decode, is_mxfp4=True)


def nvfp4(names: Mapping[str, str], shapes: Shapes, divides: bool) -> PackedWeight:
    """Return a weight of 4-bit floats with an 8-bit float for each 16 of them, and a scale in all.

    shapes: blocks [N, K / 2], the lower half of a byte first; scale [N, K / 16]; global_scale [1] or [].
    divides: the scale in all is a divisor, as in compressed-tensors, not a factor, as in ModelOpt. Raises LayoutError.
    """
    (rows, packed), scales = _matrix(shapes, "blocks"), _matrix(shapes, "scale")
    half = _NVFP4_VALUES // 2
    is_whole = rows and packed and packed % half == 0 and shapes["global_scale"] in _ONE
    if not is_whole or scales != (rows, packed // half):
        raise LayoutError(
            f"expected 4-bit floats [rows, a multiple of {half}] in bytes, scales [{rows}, {packed // half}] and one "
            f"scale in all, found {[rows, packed]}, {list(scales)} and {list(shapes['global_scale'])}"
        )

    def decode(parts: Parts) -> Tensor:
        in_all = parts["global_scale"].float().reshape(())
        each = parts["scale"].float()
        values = mxfp4.floats(mxfp4.codes_of(parts["blocks"])).reshape(rows, -1, _NVFP4_VALUES)
        return (values * (each / in_all if divides else each * in_all).unsqueeze(-1)).flatten(1)

    return PackedWeight(names, (rows, 2 * packed), "NVFP4", decode)


def scaled(
    names: Mapping[str, str], shapes: Shapes, block: tuple[int, int], kind: str, has_integers: bool = False
) -> PackedWeight:
    """Return a weight of 8-bit integers or floats (FP8) with scales.

    shapes: weight [N, K], scale, and weight_zero_point if it exists, with the shape of the scale. There is one scale
        per block, [N / block, K / block], one per row, [N, 1] or [N], or one in all, [] or [1].
    block: rows and columns that share a scale.
    kind: the type, for people.
    has_integers: True if the weight has integers.
    Raises LayoutError.
    """
    rows, columns = _matrix(shapes, "weight")
    scale_shape, blocks = shapes["scale"], (-(-rows // block[0]), -(-columns // block[1]))
    if scale_shape not in ((), (1,), (rows,), (rows, 1), blocks):
        raise LayoutError(
            f"expected scales of shape {list(blocks)} for blocks of {list(block)}, [{rows}, 1] or [1], found "
            f"{list(scale_shape)}"
        )

    zeros = shapes.get("weight_zero_point", scale_shape)
    if not rows or not columns or zeros != scale_shape:
        raise LayoutError(f"expected zeros of shape {list(scale_shape)}, as the scales, found {list(zeros)}")

    is_blocked = scale_shape == blocks and scale_shape != (rows, 1)

    def spread(values: Tensor) -> Tensor:
        """Return one number per row and group, [N, G]."""
        plain = values.float()
        return plain.repeat_interleave(block[0], 0)[:rows] if is_blocked else plain.reshape(-1, 1).expand(rows, 1)

    def grid(parts: Parts) -> IntegerGrid:
        scales = spread(parts["scale"])
        zeros = spread(parts["weight_zero_point"]) if "weight_zero_point" in parts else torch.zeros(scales.shape)
        group_of = torch.arange(columns) // (block[1] if is_blocked else columns)
        return IntegerGrid(_BYTE_BITS, zeros, scales, group_of)

    def codes(parts: Parts) -> Tensor:
        return (parts["weight"].short() + _BYTE_HALF).to(torch.uint8)

    def grid_of_codes(parts: Parts) -> IntegerGrid:
        signed = grid(parts)
        return replace(signed, zeros=signed.zeros + _BYTE_HALF)

    layout = IntegerLayout("weight", codes, grid_of_codes) if has_integers else None
    return PackedWeight(names, (rows, columns), kind, lambda parts: grid(parts).values(parts["weight"]), layout)


def _runs(columns: int, groups: int) -> Tensor:
    """Return the group of each column if groups are runs of equal length, int64 [columns]."""
    return torch.arange(columns) // (columns // groups)


def _groups_of(parts: Parts, inputs: int, groups: int) -> Tensor:
    """Return the group of each input, int64 [inputs]. Raises LayoutError."""
    if "g_idx" not in parts:
        return _runs(inputs, groups)
    of_input = parts["g_idx"].long()
    if int(of_input.min()) < 0 or int(of_input.max()) >= groups:
        raise LayoutError(f"`g_idx` names a group beyond {groups}")
    return of_input


def _matrix(shapes: Shapes, name: str) -> tuple[int, int]:
    """Return the shape of a part that must be a matrix. Raises LayoutError."""
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise LayoutError(f"expected a matrix `{name}`, found {'none' if shape is None else list(shape)}")
    return shape[0], shape[1]


def unpack_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Return `count` codes of each row, uint8 [R, count]. The codes are a stream of bits, the lowest first.

    words: int32 [R, W].
    """
    rows = max(1, _CODES_AT_ONCE // max(count, 1))
    return torch.cat([_unpacked(rows_of_words, bits, count) for rows_of_words in torch.split(words, rows)])


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes of some rows, see `unpack_codes`."""
    first = torch.arange(count) * bits
    at, shift = first // _WORD_BITS, first % _WORD_BITS
    wide = words.to(torch.int64) & 0xFFFFFFFF
    low = wide[:, at] >> shift
    if _WORD_BITS % bits:  # a code of 3 bits may continue in the next word
        high = wide[:, (at + 1).clamp_max(words.shape[1] - 1)] << (_WORD_BITS - shift)
        low = torch.where(shift + bits > _WORD_BITS, low | high, low)
    return (low & ((1 << bits) - 1)).to(torch.uint8)


def _awq_codes(words: Tensor, count: int) -> Tensor:
    """Return the codes of AWQ's words, uint8 [R, count]."""
    ordered = unpack_codes(words, AWQ_BITS, count).view(len(words), -1, len(_AWQ_ORDER))
    return ordered[:, :, list(_AWQ_ORDER)].reshape(len(words), count)
