"""Triton kernels over packed matrices: rows as matrices read them, and products.

The layout is that of docs/format.md, Packing. A program handles one row block of one matrix. It reads some tiles at a
time as a tensor [16 rows, tiles, columns of a tile]. Weights and rounded activations have the bits of `torch_weights`.
Sums have another order. Exponentials and quotients of activations are those of the device, so their last bits differ.
"""

# Triton compiles a subset of Python: no conditional expressions of tensors, no `in`, and no types in signatures.
# ruff: noqa: SIM108, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import JOB_FIELDS

INTEGERS, TERNARY, MXFP4, FLOAT16, BFLOAT16 = range(5)
"""Kinds of codes, for the constant `kind` of the kernels."""
PLAIN, SILU, RELU, CLAMPED_SWIGLU = range(4)
"""Activations, for the constant `activation` of `prepare`."""

_ROWS = tl.constexpr(16)
_PLANE = tl.constexpr(64)
_LANE = tl.constexpr(4)
_ROUNDED_COLUMNS = tl.constexpr(32)
_FRACTION_BITS = tl.constexpr(23)
_SMALLEST_ROUNDED = tl.constexpr(2.0**-110)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_SWIGLU_SLOPE = tl.constexpr(1.702)
_INTEGERS, _TERNARY, _MXFP4 = tl.constexpr(INTEGERS), tl.constexpr(TERNARY), tl.constexpr(MXFP4)
_FLOAT16, _BFLOAT16 = tl.constexpr(FLOAT16), tl.constexpr(BFLOAT16)
_PLAIN, _SILU, _RELU = tl.constexpr(PLAIN), tl.constexpr(SILU), tl.constexpr(RELU)
_JOB_FIELDS = tl.constexpr(JOB_FIELDS)


@triton.jit
def _byte(address):
    return tl.load(address).to(tl.int32)


@triton.jit
def _half(address):
    return tl.load(address.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _field(codes, quad, lane, first_plane, bits: tl.constexpr):
    """Return the field of `bits` bits of each code.

    codes: address of a tile's codes.
    quad: column / 4. lane: place of row and column in a plane.
    first_plane: plane in which the fields begin.
    """
    fields: tl.constexpr = 8 // bits
    byte = _byte(codes + _PLANE * (first_plane + quad // fields) + lane)
    return (byte >> (bits * (quad % fields))) & (2**bits - 1)


@triton.jit
def _power(exponent):
    """Return 2^(exponent - 127), int32 exponents from 1 to 254."""
    return (exponent << _FRACTION_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _floats(block, column, columns: tl.constexpr, kind: tl.constexpr):
    """Return 16-bit weights, float32 [16, ...]. Those of columns beyond the last are 0."""
    address = block + 2 * (_ROWS * column + tl.arange(0, _ROWS)[:, None, None])
    if kind == _FLOAT16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    return tl.load(pointer, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _ternary_codes(codes, quad, lane, row, within):
    """Return codes of three values. A byte holds five; the sixteenth quad has bytes of its own."""
    is_last, digit = quad == 15, quad % 5
    packed = _byte(codes + tl.where(is_last, 3 * _PLANE + row, _PLANE * (quad // 5) + lane))
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    digits = ((3 * power * packed) >> 8) - 3 * ((power * packed) >> 8)
    return tl.where(is_last, (packed >> (2 * within)) & 3, digits)


@triton.jit
def _twice_float4(code):
    """Return twice the value of 4-bit floats: 0, 1, 2, 3, 4, 6, 8, 12, and their negatives."""
    fraction, exponent = code & 1, (code >> 1) & 3
    size = tl.where(exponent == 0, fraction, (2 + fraction) << (tl.maximum(exponent, 1) - 1))
    return tl.where(code >= 8, -size, size).to(tl.float32)


@triton.jit
def _weights(
    block, tile, columns: tl.constexpr, group_tiles: tl.constexpr, kind: tl.constexpr, low: tl.constexpr,
    high: tl.constexpr, header: tl.constexpr, tile_columns: tl.constexpr, tile_bytes: tl.constexpr,
    byte_scales: tl.constexpr,
):  # fmt: skip
    """Return the weights of some tiles of a row block, float32 [16, tiles, tile_columns].

    block: address of the row block.
    tile: numbers of the tiles, int32 [1, tiles, 1], each below the number of tiles.
    group_tiles: tiles of a group.
    low, high: bits of the two fields of a code.
    header: bytes of one row's scale and minimum of a group.
    """
    row, column = tl.arange(0, _ROWS)[:, None, None], tl.arange(0, tile_columns)[None, None, :]
    if (kind == _FLOAT16) or (kind == _BFLOAT16):
        values = _floats(block, tile * tile_columns + column, columns, kind)
    else:
        quad, within = column // _LANE, column % _LANE
        lane, group = _LANE * row + within, tile // group_tiles
        record = block + group * (_ROWS * header + group_tiles * tile_bytes)
        if byte_scales:
            record += 2 * _ROWS
        codes = record + _ROWS * header + (tile - group * group_tiles) * tile_bytes
        if kind == _TERNARY:
            code = _ternary_codes(codes, quad, lane, row, within)
            values = _half(record + 2 * row) * (code - 1).to(tl.float32)
        elif kind == _MXFP4:
            values = _power(_byte(record + row) - 1) * _twice_float4(_field(codes, quad, lane, 0, low))
        else:
            code = _field(codes, quad, lane, 0, low)
            if high > 0:
                code = code | (_field(codes, quad, lane, low, high) << low)
            value = code.to(tl.float32)
            if byte_scales:
                scale = _byte(record + row).to(tl.float32) * _power(_byte(block + row))
                minimum = _byte(record + _ROWS + row).to(tl.float32) * _power(_byte(block + _ROWS + row))
                values = scale * value - minimum
            elif header == 2:
                values = _half(record + 2 * row) * (value - 2.0 ** (low + high - 1))
            else:
                values = _half(record + 2 * row) * value + _half(record + 2 * _ROWS + 2 * row)
    return values


@triton.jit
def _rounded(x):
    """Round values, float32 [n, 32], to 8 bits per row of 32, as `torch_weights.round_activations` does."""
    largest = tl.max(tl.abs(x), axis=1)[:, None]
    has_nan = tl.max((x != x).to(tl.int32), axis=1)[:, None] != 0  # which the maximum leaves out
    most = tl.full(largest.shape, 127.0, tl.float32)
    is_rounded = largest >= _SMALLEST_ROUNDED
    inverse = tl.where(is_rounded, tl.div_rn(most, tl.where(is_rounded, largest, 1.0)), 0.0)
    scaled = x * inverse
    scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    codes = (scaled + _ROUNDER) - _ROUNDER
    step = tl.div_rn(tl.where((largest < float("inf")) & (has_nan == 0), largest, float("nan")), most)
    return codes * step


@triton.jit(
    do_not_specialize=["columns", "in_stride", "out_stride", "pairs", "limit"],
    do_not_specialize_on_alignment=["is_rounded"],
)
def prepare(
    inputs,
    outputs,
    is_rounded,
    columns,
    in_stride,
    out_stride,
    pairs,
    limit,
    activation: tl.constexpr,
    step: tl.constexpr,
):
    """Write rows as matrices read them: after an activation, and rounded to 8 bits where is_rounded has 1.

    The grid is [rows, steps of columns].

    inputs: float32 rows; with an activation rows of gate, and `pairs` rows later those of up.
    is_rounded: int64 [rows].
    step: columns of a program, a multiple of 32.
    """
    number = tl.program_id(0)
    column = tl.program_id(1) * step + tl.arange(0, step)
    is_inside = column < columns
    row = inputs + number.to(tl.int64) * in_stride
    if activation == _PLAIN:
        values = tl.load(row + column, mask=is_inside, other=0.0)
    else:
        up = tl.load(row + pairs.to(tl.int64) * in_stride + column, mask=is_inside, other=0.0)
        if activation == _RELU:
            values = tl.where(up < 0.0, 0.0, up)
        else:
            gate = tl.load(row + column, mask=is_inside, other=0.0)
            if activation == _SILU:
                values = gate / (1 + tl.exp(-gate)) * up
            else:
                gate = tl.where(gate > limit, limit, gate)  # keeps NaN, as tl.minimum does not
                up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
                values = (up + 1) * (gate / (1 + tl.exp(gate * -_SWIGLU_SLOPE)))
    if tl.load(is_rounded + number) != 0:
        groups = tl.reshape(values, (step // _ROUNDED_COLUMNS, _ROUNDED_COLUMNS))
        values = tl.reshape(_rounded(groups), (step,))
    tl.store(outputs + number.to(tl.int64) * out_stride + column, values, mask=is_inside)


@triton.jit
def _no_sums(width: tl.constexpr, pairs_per_job: tl.constexpr):
    """Return sums of 0: one for each row and column with one pair, [16, width], else for each pair and row, [n, 16]."""
    if pairs_per_job == 1:
        sums = tl.zeros((_ROWS, width), tl.float32)
    else:
        sums = tl.zeros((pairs_per_job, _ROWS), tl.float32)
    return sums


@triton.jit
def _with_product(sums, weights, x, pairs_per_job: tl.constexpr):
    """Return sums with the products of weights [16, width] and inputs [n, width] added."""
    if pairs_per_job == 1:
        sums += weights * x
    else:
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit
def _sums(sums, pairs_per_job: tl.constexpr):
    """Return the sum of each pair and row, [n, 16]."""
    if pairs_per_job == 1:
        sums = tl.sum(sums, axis=1)[None, :]
    return sums


@triton.jit(
    do_not_specialize=["first", "rows", "block_bytes", "in_stride", "out_stride"],
    do_not_specialize_on_alignment=["jobs", "sources"],
)
def products(
    jobs, sources, inputs, outputs, first, rows, block_bytes, in_stride, out_stride,
    columns: tl.constexpr, group_tiles: tl.constexpr, tiles: tl.constexpr, kind: tl.constexpr, low: tl.constexpr,
    high: tl.constexpr, header: tl.constexpr, tile_columns: tl.constexpr, tile_bytes: tl.constexpr,
    byte_scales: tl.constexpr, pairs_per_job: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Multiply rows by one matrix for each job: outputs[result] = matrix x inputs[sources[pair]] + bias.

    The grid is [row blocks, jobs].
    jobs: int64 [n, JOB_FIELDS]; a job without an address does nothing.
    first: number of the first job.
    sources: input row of each pair, int64.
    inputs, outputs: float32, with in_stride and out_stride values from row to row.
    pairs_per_job: most pairs of a job: 1, or a power of 2 from 16 on.
    step: tiles that are read at a time.
    """
    block, job = tl.program_id(0), jobs + _JOB_FIELDS * (first + tl.program_id(1))
    address = tl.load(job)
    if address == 0:
        return
    base = (address + block.to(tl.int64) * block_bytes).to(tl.pointer_type(tl.uint8))
    bias, pair = tl.load(job + 1), tl.load(job + 2) + tl.arange(0, pairs_per_job)
    is_pair = tl.arange(0, pairs_per_job) < tl.load(job + 3)
    source = inputs + tl.load(sources + pair, mask=is_pair, other=0) * in_stride
    width: tl.constexpr = step * tile_columns
    total = _no_sums(width, pairs_per_job)
    for start in range(0, tiles, step):
        tile = start + tl.arange(0, step)[None, :, None]
        column = start * tile_columns + tl.arange(0, width)
        weights = _weights(
            base, tl.minimum(tile, tiles - 1), columns, group_tiles, kind, low, high, header, tile_columns, tile_bytes,
            byte_scales,
        )  # fmt: skip
        weights = tl.reshape(tl.where(tile < tiles, weights, 0.0), (_ROWS, width))
        x = tl.load(source[:, None] + column[None, :], mask=is_pair[:, None] & (column[None, :] < columns), other=0.0)
        total = _with_product(total, weights, x, pairs_per_job)
    sums = _sums(total, pairs_per_job)
    row = block * _ROWS + tl.arange(0, _ROWS)
    if bias != 0:
        sums += tl.load(bias.to(tl.pointer_type(tl.float32)) + row, mask=row < rows, other=0.0)[None, :]
    target = outputs + (pair + tl.load(job + 4)) * out_stride
    tl.store(target[:, None] + row[None, :], sums, mask=is_pair[:, None] & (row[None, :] < rows))
