"""Weights that a checkpoint stores as integer codes: the same codes in a format of moec, where one holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from moec.manifests.model import UnitKey
from moec.manifests.quant import MAX_DIMENSION, QuantSpec

from ..checkpoint.integer_codes import IntegerCodes
from ..families.lowering import Lowering
from .quantized import QuantizedMatrix
from .quantizers import Quantizer
from .quantizers.rtn import rounded_rows

_ROWS_AT_ONCE = 2048

ExactMatrices = Callable[[UnitKey, Sequence[QuantSpec]], dict[QuantSpec, QuantizedMatrix]]
"""Returns a unit in those of some formats that hold the checkpoint's own codes of it."""


def exact_matrices(lowering: Lowering, unit: UnitKey, specs: Sequence[QuantSpec]) -> dict[QuantSpec, QuantizedMatrix]:
    """Return a unit in those of the formats that hold the checkpoint's own codes.

    The weights are those before they are rounded to the 16 bits of the baseline. Raises CheckpointError.
    """
    need = lowering.code_need(unit)
    exact = [spec for spec in specs if need is not None and need.is_met_by(spec)]
    stored = lowering.unit_codes(unit) if exact else None
    return {} if stored is None else {spec: hold_codes(stored, spec) for spec in exact}


def no_codes(unit: UnitKey, specs: Sequence[QuantSpec]) -> dict[QuantSpec, QuantizedMatrix]:
    """Return nothing: no unit has codes of its own."""
    return {}


def hold_codes(stored: IntegerCodes, spec: QuantSpec) -> QuantizedMatrix:
    """Return the matrix in a format that meets its need (CodeNeed.is_met_by).

    Symmetric formats hold the distances of the codes from their zeros. The others hold the codes as they are, with
    minimum = -scale x zero. Of a wide group, each of several finer ones gets the scale.
    """
    grid, columns = stored.grid, stored.codes.shape[1]
    groups = spec.groups(columns)
    scales, zeros = (values.repeat_interleave(groups // values.shape[1], 1) for values in (grid.scales, grid.zeros))
    if not spec.symmetric:
        minima = -scales * zeros
        if grid.minima is not None:
            minima = grid.minima.repeat_interleave(groups // grid.minima.shape[1], 1)
        return QuantizedMatrix(spec, stored.codes.contiguous(), scales.half(), minima.half())
    moved = (spec.centre - zeros).short().repeat_interleave(columns // groups, 1)
    return QuantizedMatrix(spec, (stored.codes + moved).to(torch.uint8), scales.half(), None)


def unit_matrix(lowering: Lowering, unit: UnitKey, spec: QuantSpec, quantize: Quantizer) -> QuantizedMatrix:
    """Return a unit in a format below 16 bits: its own codes, or those of a quantizer without the inputs.

    Raises CheckpointError.
    """
    exact = exact_matrices(lowering, unit, (spec,)).get(spec)
    return quantize(lowering.unit(unit).float(), spec, None, 0) if exact is None else exact


def dense_matrices(lowering: Lowering, name: str, spec: QuantSpec) -> Iterator[QuantizedMatrix]:
    """Yield a dense matrix in a format below 16 bits, a bounded number of rows at a time.

    It has the checkpoint's own codes if the format holds them, else weights are rounded to nearest with clip search.
    Raises CheckpointError.
    """
    need, rows = lowering.dense_code_need(name), lowering.model.dense_shapes()[name][0]
    has_codes, is_by_rows = need is not None and need.is_met_by(spec), lowering.reads_rows(name)
    codes = lowering.dense_codes(name) if has_codes and not is_by_rows else None
    weight = None if has_codes or is_by_rows else lowering.dense_weight(name)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = (start, min(start + _ROWS_AT_ONCE, rows))
        stored = codes.select(*part) if codes is not None else lowering.dense_codes(name, part) if has_codes else None
        if stored is not None:
            yield hold_codes(stored, spec)
        else:
            some = lowering.dense_weight(name, part) if weight is None else weight[slice(*part)]
            yield from (matrix for _, matrix in rounded_rows(some, spec))


def held_units(lowering: Lowering) -> dict[QuantSpec, int]:
    """Return the smallest format that holds the codes of each unit, with the number of units that it holds, most first.

    A format with finer groups may hold the units of others, too. Raises CheckpointError.
    """
    needs = Counter(lowering.code_needs().values())
    least = {spec for spec in (need.least_format() for need in needs) if spec is not None}
    counts = {spec: sum(count for need, count in needs.items() if need.is_met_by(spec)) for spec in least}
    return dict(
        sorted(counts.items(), key=lambda item: (-item[1], item[0].bitwidth, -(item[0].group_size or MAX_DIMENSION)))
    )


def units_held_by(lowering: Lowering, plan: Mapping[UnitKey, QuantSpec]) -> int:
    """Return how many units of a plan keep the codes of the checkpoint, mxfp4 included. Raises CheckpointError."""
    needs = lowering.code_needs()
    return sum(spec.is_mxfp4 or (unit in needs and needs[unit].is_met_by(spec)) for unit, spec in plan.items())


def units_with_rounded_scales(lowering: Lowering, plan: Mapping[UnitKey, QuantSpec]) -> int:
    """Return how many of these units have scales that float16 rounds. Raises CheckpointError."""
    needs = lowering.code_needs()
    return sum(unit in needs and needs[unit].rounds_scales and needs[unit].is_met_by(plan[unit]) for unit in plan)
