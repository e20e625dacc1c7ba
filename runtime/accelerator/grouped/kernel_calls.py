"""Launch the Triton kernels over packed matrices of a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from moec.manifests.quant import COLUMNS_PER_TILE, ROWS_PER_BLOCK, QuantSpec, round_up

from . import triton_kernels

_STEP_COLUMNS = 128
_PREPARED_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Data of a matrix for the kernels.

    blocks: row blocks.
    numbers: rows, and bytes of a row block. They may change from call to call.
    constants: what kernels are compiled for, by the name of the parameter.
    """

    blocks: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


@lru_cache(maxsize=256)
def shape_of(rows: int, columns: int, spec: QuantSpec) -> Shape:
    """Return the data of a matrix of this format for the kernels."""
    blocks = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK
    block_bytes = spec.packed_bytes(rows, columns) // blocks
    is_float = spec.bitwidth == 16
    tile_columns = COLUMNS_PER_TILE if is_float else spec.tile_columns
    tiles = -(-columns // tile_columns)
    low, *high = (0,) if is_float or spec.is_ternary else spec.plane_bits
    constants = {
        "columns": columns,
        "group_tiles": 1 if is_float else tiles // spec.groups(columns),
        "tiles": tiles,
        "kind": _kind(spec),
        "low": low,
        "high": high[0] if high else 0,
        "header": 0 if is_float else spec.group_header_bytes,
        "tile_columns": tile_columns,
        "tile_bytes": 0 if is_float else ROWS_PER_BLOCK * spec.tile_row_bytes,
        "byte_scales": spec.byte_scales,
        "step": _STEP_COLUMNS // tile_columns,
    }
    return Shape(blocks, (rows, block_bytes), constants)


def _kind(spec: QuantSpec) -> int:
    if spec.bitwidth == 16:
        return triton_kernels.BFLOAT16 if spec.float_type == "bfloat16" else triton_kernels.FLOAT16
    if spec.is_ternary:
        return triton_kernels.TERNARY
    return triton_kernels.MXFP4 if spec.is_mxfp4 else triton_kernels.INTEGERS


@dataclass(frozen=True, slots=True)
class Jobs:
    """Products that kernels do.

    table: int64 [n, JOB_FIELDS].
    first, count: the jobs of a call.
    sources: input row of each pair, int64 [n].
    pairs_per_job: most pairs of a job; see `triton_kernels.products`.
    """

    table: torch.Tensor
    first: int
    count: int
    sources: torch.Tensor
    pairs_per_job: int


def multiply(shape: Shape, jobs: Jobs, source: torch.Tensor, target: torch.Tensor) -> None:
    """Begin the products of some jobs whose matrices have one shape and format.

    source, target: rows, float32 [n, columns] and [n, rows].
    """
    constants = shape.constants
    if jobs.pairs_per_job > 1:
        constants = {**constants, "step": max(1, constants["step"] // 2)}
    triton_kernels.products[(shape.blocks, jobs.count)](
        jobs.table, jobs.sources, source, target, jobs.first, *shape.numbers, source.stride(0), target.stride(0),
        **constants, pairs_per_job=jobs.pairs_per_job,
    )  # fmt: skip


def prepare(
    source: torch.Tensor,
    target: torch.Tensor,
    is_rounded: torch.Tensor,
    activation: int = triton_kernels.PLAIN,
    limit: float = 0,
) -> None:
    """Begin to write rows as matrices read them.

    source: float32 [n, columns]; with an activation [2 n, columns], rows of gate and then rows of up.
    target: float32 [n, columns].
    is_rounded: int64 [n].
    """
    count, columns = target.shape
    triton_kernels.prepare[(count, -(-columns // _PREPARED_COLUMNS))](
        source, target, is_rounded, columns, source.stride(0), target.stride(0), count, float(limit), activation,
        _PREPARED_COLUMNS,
    )  # fmt: skip
