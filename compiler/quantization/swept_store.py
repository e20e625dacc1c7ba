"""Quantized experts of all layers on disk, packed, with the cost of every format: what the search and emit ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec

from ..families import Lowering
from ..workspace.journal import Journal, StoredBytes
from .packing import pack, unpack
from .quantized import LEFT_OUT, QuantizedMatrix, RangeExceeded, left_out
from .unit_store import UnitStore


def stage_name(layer: int, spec: QuantSpec) -> str:
    """Return the journal's name for the units of a layer in one format."""
    return f"units-{layer}-{spec}"


class SweptStore(UnitStore):
    """The units of a sweep in the journal's folder, one file for each layer and format.

    Other formats are rounded when they are first needed, without knowledge of the inputs.
    specs: formats of the sweep, below 16 bits.
    """

    def __init__(self, lowering: Lowering, quantizer: str, specs: Sequence[QuantSpec], journal: Journal) -> None:
        super().__init__(lowering, quantizer)
        self.specs = tuple(spec for spec in specs if spec.bitwidth < 16)
        self._columns = {spec: at for at, spec in enumerate((*self.specs, LEFT_OUT))}
        layers = range(self.model.num_layers)
        self._rows = {unit: at for layer in layers for at, unit in enumerate(self.model.units_of_layer(layer))}
        self._starts: dict[QuantSpec, dict[UnitKey, int]] = {spec: {} for spec in self.specs}
        for spec in self.specs:
            for layer in range(self.model.num_layers):
                self._starts[spec].update(_starts(self.model, layer, spec))
        self._journal = journal
        self._costs: dict[int, np.ndarray] = {}
        self._files: dict[tuple[int, QuantSpec], StoredBytes] = {}

    @property
    def priced_specs(self) -> tuple[QuantSpec, ...]:
        """Formats that have a cost: those below 16 bits, then pruning."""
        return (*self.specs, LEFT_OUT)

    def add_layer(self, layer: int, costs: np.ndarray) -> bool:
        """Take over a layer that has been quantized. Returns False if a file is missing or damaged, or costs are.

        costs: float64 [units, priced_specs], infinite where a format does not fit, or does not hold the
            values. Pruning is priced for down alone.
        """
        units = self.model.units_of_layer(layer)
        if costs.shape != (len(units), len(self.specs) + 1):
            return False
        stored = {spec: self._journal.read_stream(stage_name(layer, spec)) for spec in self.specs} if units else {}
        files = {(layer, spec): file for spec, file in stored.items() if file is not None}
        if len(files) < len(stored):
            return False
        self._costs[layer] = costs
        self._files.update(files)
        return True

    def holds(self, unit: UnitKey, spec: QuantSpec) -> bool:
        if spec not in self._columns:
            return super().holds(unit, spec)
        return spec.is_pruned or bool(np.isfinite(self.error(unit, spec)))

    def unheld(self) -> dict[UnitKey, list[QuantSpec]]:
        """Return the units whose values exceed formats that fit them, with these formats."""
        exceeded = dict[UnitKey, list[QuantSpec]]()
        for spec in self.specs:
            for unit in self._starts[spec]:
                if not self.holds(unit, spec):
                    exceeded.setdefault(unit, []).append(spec)
        return exceeded

    def error(self, unit: UnitKey, spec: QuantSpec) -> float:
        if spec not in self._columns:
            return super().error(unit, spec)
        return float(self._costs[unit.layer][self._rows[unit], self._columns[spec]])

    def for_bundle(self, unit: UnitKey, spec: QuantSpec) -> np.ndarray:
        if spec.is_pruned:
            return np.empty(0, np.uint8)
        if spec not in self._columns:
            return super().for_bundle(unit, spec)
        if not self.holds(unit, spec):
            raise RangeExceeded(f"its weights exceed the float16 scales of format {spec}")
        size = spec.packed_bytes(*self.model.unit_shape(unit.layer, unit.projection))
        return self._files[(unit.layer, spec)].read(self._starts[spec][unit], size)

    def matrix(self, unit: UnitKey, spec: QuantSpec) -> QuantizedMatrix:
        if spec.is_pruned:
            return left_out(self.model.unit_shape(unit.layer, unit.projection)[0])
        if spec not in self._columns:
            return super().matrix(unit, spec)
        return unpack(self.for_bundle(unit, spec), *self.model.unit_shape(unit.layer, unit.projection), spec)


def _starts(model: ModelSpec, layer: int, spec: QuantSpec) -> dict[UnitKey, int]:
    """Return where each unit of a layer that fits a format begins in the file of that format."""
    starts, end = {}, 0
    for unit in model.units_of_layer(layer):
        rows, columns = model.unit_shape(layer, unit.projection)
        if spec.fits(columns):
            starts[unit] = end
            end += spec.packed_bytes(rows, columns)
    return starts


def packed_unit(
    matrices: Mapping[tuple[UnitKey, QuantSpec], QuantizedMatrix], unit: UnitKey, spec: QuantSpec, model: ModelSpec
) -> bytes:
    """Return the bytes of a unit in a format: none where it does not fit, zeros where it does not hold the values."""
    matrix, (rows, columns) = matrices.get((unit, spec)), model.unit_shape(unit.layer, unit.projection)
    if matrix is not None:
        return pack(matrix).tobytes()
    return bytes(spec.packed_bytes(rows, columns)) if spec.fits(columns) else b""
