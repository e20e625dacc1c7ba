"""Each unit in each format that the search requests, quantized once. A batch holds all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..calibration.second_moments import SecondMoments
from ..families.lowering import Lowering
from ..workspace.parallel import workers
from .output_error import output_error
from .packing import pack
from .quantized import QuantizedMatrix, left_out
from .quantizers import quantize_batch
from .quantizers.rtn import quantize_rtn

UnitBatch = tuple[int, str, QuantSpec]
"""One projection of all experts of a layer in one format."""
QuantizedBatch = Sequence[tuple[QuantizedMatrix, float]]
"""Codes and output error of each expert."""
QuantizeElsewhere = Callable[["UnitStore", Sequence[UnitBatch]], Iterator[QuantizedBatch]]
"""Quantizes the batches of a store outside this process, and yields the results in order."""


class UnitStore:
    """Quantized units and dense weights of one checkpoint, kept in memory as codes.

    quantizer: `gptq`, `rtn` or `quanto`.
    second_moments: inputs of the projections. With None, gptq rounds to nearest and errors are unweighted.
    """

    def __init__(self, lowering: Lowering, second_moments: SecondMoments | None, quantizer: str) -> None:
        self.lowering, self.quantizer = lowering, quantizer
        self.model: ModelSpec = lowering.model
        self._moments = second_moments
        self._units: dict[tuple[UnitKey, QuantSpec], QuantizedMatrix] = {}
        self._errors: dict[tuple[UnitKey, QuantSpec], float] = {}
        self._dense: dict[tuple[str, QuantSpec], QuantizedMatrix] = {}
        self._weights: dict[tuple[int, str], torch.Tensor] = {}

    def prepare(
        self, specs: Iterable[QuantSpec], progress: Progress, elsewhere: QuantizeElsewhere | None = None
    ) -> None:
        """Quantize all units in these formats.

        progress: called with (batches done, batches in all).
        elsewhere: quantizes the batches, or None for the threads of this process.
        """
        jobs = [
            (layer, projection, spec)
            for layer in self.model.expert_layers
            for projection in self.model.layers[layer].experts.projections
            for spec in specs
            if spec.bitwidth < 16 and spec.fits(self.model.unit_shape(layer, projection)[1])
        ]
        wanted = [job for job in jobs if not self._has(*job)]
        results = self._quantize_here(wanted) if elsewhere is None else elsewhere(self, wanted)
        for done, (job, result) in enumerate(zip(wanted, results, strict=True), 1):
            self._keep(*job, result)
            progress(done, len(wanted))

    def _quantize_here(self, wanted: Sequence[UnitBatch]) -> Iterator[QuantizedBatch]:
        for layer, projection, _ in wanted:
            self.original(layer, projection)  # one thread reads the weights before the pool starts
        with workers(torch.get_num_threads()) as pool:
            yield from pool.in_order(lambda job: self.quantized(*job), wanted)

    @property
    def second_moments(self) -> SecondMoments | None:
        """Second moments that weigh the errors of units, or None."""
        return self._moments

    def original(self, layer: int, projection: str) -> torch.Tensor:
        """Return one projection of all experts of a layer, float32 [E, N, K]."""
        key = (layer, projection)
        if key not in self._weights:
            count = self.model.layers[layer].experts.count
            rows = [self.lowering.unit(UnitKey(layer, expert, projection)) for expert in range(count)]
            self._weights[key] = torch.stack(rows).float()
        return self._weights[key]

    def _has(self, layer: int, projection: str, spec: QuantSpec) -> bool:
        return (UnitKey(layer, 0, projection), spec) in self._units

    def _quantize(self, layer: int, projection: str, spec: QuantSpec) -> None:
        if not self._has(layer, projection, spec):
            self._keep(layer, projection, spec, self.quantized(layer, projection, spec))

    def quantized(self, layer: int, projection: str, spec: QuantSpec) -> list[tuple[QuantizedMatrix, float]]:
        """Return one projection of all experts of a layer with output errors. Only the cache of weights changes."""
        weights = self.original(layer, projection)
        moments = tokens = None
        if self._moments is not None:
            moments, tokens = self._moments.of(layer, projection), self._moments.tokens(layer)
        found = []
        for expert, matrix in enumerate(self._quantize_batch(weights, spec, moments, tokens)):
            moment = None if moments is None else moments[expert]
            stored = torch.zeros_like(weights[expert]) if spec.is_pruned else matrix.dequantize()
            found.append((matrix, float(output_error(weights[expert], stored, moment))))
        return found

    def _keep(
        self, layer: int, projection: str, spec: QuantSpec, results: Iterable[tuple[QuantizedMatrix, float]]
    ) -> None:
        for expert, (matrix, error) in enumerate(results):
            key = (UnitKey(layer, expert, projection), spec)
            self._units[key], self._errors[key] = matrix, error

    def _quantize_batch(
        self, weights: torch.Tensor, spec: QuantSpec, moments: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> list[QuantizedMatrix]:
        return quantize_batch(self.quantizer, weights, spec, moments, tokens)

    def matrix(self, unit: UnitKey, spec: QuantSpec) -> QuantizedMatrix:
        """Return the codes of one unit in a format below 16 bits."""
        if spec.is_pruned:
            return left_out(self.model.unit_shape(unit.layer, unit.projection)[0])
        self._quantize(unit.layer, unit.projection, spec)
        return self._units[(unit, spec)]

    def for_bundle(self, unit: UnitKey, spec: QuantSpec) -> np.ndarray:
        """Return the bytes of one unit as the bundle stores them, uint8."""
        return pack(self.matrix(unit, spec))

    def weight(self, unit: UnitKey, spec: QuantSpec) -> torch.Tensor:
        """Return the weights that the runtime would compute with, float32 [N, K]; [N, 0] for a pruned expert."""
        if spec.bitwidth == 16:
            return self.original(unit.layer, unit.projection)[unit.expert]
        return self.matrix(unit, spec).dequantize()

    def error(self, unit: UnitKey, spec: QuantSpec) -> float:
        """Return the routing-weighted squared output error of one unit, 0 at 16 bits."""
        if spec.bitwidth == 16:
            return 0.0
        self._quantize(unit.layer, unit.projection, spec)
        return self._errors[(unit, spec)]

    def dense_matrix(self, name: str, spec: QuantSpec) -> QuantizedMatrix:
        """Return the codes of one dense weight below 16 bits, rounded to nearest with clip search."""
        if (name, spec) not in self._dense:
            self._dense[(name, spec)] = quantize_rtn(self.lowering.dense_weight(name).float(), spec, clip_search=True)
        return self._dense[(name, spec)]

    def dense_weight(self, name: str, spec: QuantSpec) -> torch.Tensor:
        """Return the dense weight that the runtime would compute with, float32."""
        if spec.bitwidth == 16:
            return self.lowering.dense_weight(name).float()
        return self.dense_matrix(name, spec).dequantize()

    def dense_error(self, name: str, spec: QuantSpec) -> float:
        """Return the squared weight error of one dense weight, 0 at 16 bits."""
        if spec.bitwidth == 16:
            return 0.0
        difference = self.lowering.dense_weight(name).float() - self.dense_weight(name, spec)
        return float(difference.square().sum())
