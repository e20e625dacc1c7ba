"""Quantized experts of all layers on disk, packed, with the costs of every format: what the search and emit ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from moec.manifests.model import PROJECTIONS, ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec

from ..families import Lowering
from ..quantization.packing import pack, unpack
from ..quantization.quantized import LEFT_OUT, QuantizedMatrix, left_out
from ..quantization.quantizers.rtn import rounded_rows
from ..quantization.unit_store import UnitStore
from ..workspace.journal import Journal, StoredBytes


def layer_units(model: ModelSpec, layer: int) -> list[UnitKey]:
    """The units of a layer in the order in which they are kept: expert by expert, gate, up, down."""
    count = model.layers[layer].experts.count
    return [UnitKey(layer, expert, projection) for expert in range(count) for projection in PROJECTIONS]


def stage_name(layer: int, spec: QuantSpec) -> str:
    """The journal's name for the units of a layer in one format."""
    return f"units-{layer}-{spec}"


class StreamedStore(UnitStore):
    """What UnitStore holds in memory, in the journal's folder: one file per layer and format.

    costs: per layer float64 [units, specs + 1], infinite where a format does not fit; the last is of a down projection
    without weights, infinite for the others.
    """

    def __init__(self, lowering: Lowering, quantizer: str, specs: Sequence[QuantSpec], journal: Journal) -> None:
        super().__init__(lowering, None, quantizer)
        self.specs = tuple(spec for spec in specs if spec.bitwidth < 16)
        self._journal = journal
        self._costs: dict[int, np.ndarray] = {}
        self._files: dict[tuple[int, QuantSpec], StoredBytes] = {}
        self._dense_costs: dict[tuple[str, QuantSpec], float] = {}

    def add_layer(self, layer: int, costs: np.ndarray) -> bool:
        """Take over a layer that has been quantized; False if a file of it is missing or damaged, or costs are."""
        if costs.shape != (len(layer_units(self.model, layer)), len(self.specs) + 1):
            return False
        if not layer_units(self.model, layer):
            self._costs[layer] = costs
            return True
        found = {spec: self._journal.read_stream(stage_name(layer, spec)) for spec in self.specs}
        files = {(layer, spec): stored for spec, stored in found.items() if stored is not None}
        if len(files) < len(found):
            return False
        self._costs[layer] = costs
        self._files.update(files)
        return True

    def _column(self, unit: UnitKey, spec: QuantSpec) -> float:
        row = unit.expert * len(PROJECTIONS) + PROJECTIONS.index(unit.projection)
        return float(self._costs[unit.layer][row, (*self.specs, LEFT_OUT).index(spec)])

    def error(self, unit: UnitKey, spec: QuantSpec) -> float:
        return 0.0 if spec.bitwidth == 16 else self._column(unit, spec)

    def for_bundle(self, unit: UnitKey, spec: QuantSpec) -> np.ndarray:
        if spec.is_pruned:
            return np.empty(0, np.uint8)
        start = 0
        for before in layer_units(self.model, unit.layer):
            rows, columns = self.model.unit_shape(before.layer, before.projection)
            size = spec.packed_bytes(rows, columns) if spec.fits(columns) else 0
            if before == unit:
                return self._files[(unit.layer, spec)].read(start, size)
            start += size
        raise KeyError(unit)

    def matrix(self, unit: UnitKey, spec: QuantSpec) -> QuantizedMatrix:
        if spec.is_pruned:
            return left_out(self.model.unit_shape(unit.layer, unit.projection)[0])
        return unpack(self.for_bundle(unit, spec), *self.model.unit_shape(unit.layer, unit.projection), spec)

    def weight(self, unit: UnitKey, spec: QuantSpec) -> torch.Tensor:
        if spec.bitwidth == 16:
            return self.lowering.unit(unit).float()
        return self.matrix(unit, spec).dequantize()

    def dense_matrix(self, name: str, spec: QuantSpec) -> QuantizedMatrix:
        """Codes of one dense weight, made anew every time: rows are rounded apart, a bounded number at once."""
        parts = [part for _, part in rounded_rows(self.lowering.dense_weight(name), spec)]
        minima = [part.minima for part in parts if part.minima is not None]
        codes, scales = (torch.cat([getattr(part, of) for part in parts]) for of in ("codes", "scales"))
        return QuantizedMatrix(spec, codes, scales, torch.cat(minima) if minima else None)

    def dense_error(self, name: str, spec: QuantSpec) -> float:
        if spec.bitwidth == 16:
            return 0.0
        if (name, spec) not in self._dense_costs:
            total = 0.0
            for rows, part in rounded_rows(self.lowering.dense_weight(name), spec):
                total += float((rows - part.dequantize()).square().sum(dtype=torch.float64))
            self._dense_costs[(name, spec)] = total
        return self._dense_costs[(name, spec)]


def packed_layer(
    model: ModelSpec, matrices: Mapping[tuple[UnitKey, QuantSpec], QuantizedMatrix], unit: UnitKey, spec: QuantSpec
) -> bytes:
    """The bytes of one unit in one format, none where the format does not fit."""
    matrix = matrices.get((unit, spec))
    return b"" if matrix is None else pack(matrix).tobytes()
