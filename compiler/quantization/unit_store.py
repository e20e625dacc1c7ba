"""Weights of one checkpoint in the formats of plans: what trials compute with and bundles store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec

from ..families.lowering import Lowering
from .own_codes import unit_matrix
from .packing import pack
from .quantized import QuantizedMatrix, left_out
from .quantizers import quantizer as find_quantizer
from .quantizers.rtn import holds, rounded_rows

_KEPT_BYTES = 1 << 30
"""Bytes of codes that a store keeps. What exceeds them is quantized again at its next use."""


class UnitStore:
    """Quantized units and dense weights of one checkpoint. Units are quantized when they are first needed.

    quantizer: `gptq`, `rtn` or `quanto`, without knowledge of the inputs.
    """

    def __init__(self, lowering: Lowering, quantizer: str) -> None:
        self.lowering, self.quantizer = lowering, quantizer
        self.model: ModelSpec = lowering.model
        self._kept: dict[tuple[UnitKey | str, QuantSpec], QuantizedMatrix] = {}
        self._free_bytes = _KEPT_BYTES
        self._dense_errors: dict[tuple[str, QuantSpec], float] = {}

    def holds(self, unit: UnitKey, spec: QuantSpec) -> bool:
        """Return whether a format that fits a unit also holds its values: its scales may exceed float16.

        Formats without such scales hold everything, so the unit is not read.
        """
        if spec.bitwidth == 16 or spec.is_pruned or spec.is_mxfp4:
            return True
        need = self.lowering.code_need(unit)
        if need is not None and need.is_met_by(spec):
            return True
        return holds(self.lowering.unit(unit), spec)

    def held_by_all(self, specs: Sequence[QuantSpec]) -> list[QuantSpec]:
        """Return the formats that hold every unit that they fit."""
        left = list(specs)
        for unit in self.model.unit_keys():
            columns = self.model.unit_shape(unit.layer, unit.projection)[1]
            left = [spec for spec in left if not spec.fits(columns) or self.holds(unit, spec)]
        return left

    def held_dense(self, options: Sequence[Mapping[str, QuantSpec]]) -> tuple[dict[str, QuantSpec], ...]:
        """Return formats of dense weights, with 16 bits where a format does not hold the values of a weight."""
        plain, options_held = self.lowering.spec_16bit, tuple(dict(formats) for formats in options)
        for name in options[0] if options else ():
            if any(formats[name].bitwidth < 16 for formats in options):
                weight = self.lowering.dense_weight(name)
                for formats in options_held:
                    formats[name] = formats[name] if holds(weight, formats[name]) else plain
        return options_held

    def matrix(self, unit: UnitKey, spec: QuantSpec) -> QuantizedMatrix:
        """Return the codes of one unit in a format below 16 bits. Raises RangeExceeded."""
        if spec.is_pruned:
            return left_out(self.model.unit_shape(unit.layer, unit.projection)[0])
        if (unit, spec) in self._kept:
            return self._kept[(unit, spec)]
        return self._keep(unit, spec, unit_matrix(self.lowering, unit, spec, find_quantizer(self.quantizer)))

    def _keep(self, name: UnitKey | str, spec: QuantSpec, matrix: QuantizedMatrix) -> QuantizedMatrix:
        size = matrix.codes.numel() + 2 * matrix.scales.numel()
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._kept[(name, spec)] = matrix
        return matrix

    def for_bundle(self, unit: UnitKey, spec: QuantSpec) -> np.ndarray:
        """Return the bytes of one unit as the bundle stores them, uint8."""
        return pack(self.matrix(unit, spec))

    def weight(self, unit: UnitKey, spec: QuantSpec) -> torch.Tensor:
        """Return the weights that the runtime would compute with, float32 [N, K]; [N, 0] for a pruned expert."""
        if spec.bitwidth == 16:
            return self.lowering.unit(unit).float()
        return self.matrix(unit, spec).dequantize()

    def error(self, unit: UnitKey, spec: QuantSpec) -> float:
        """Return the squared error of one unit's weights, 0 at 16 bits."""
        if spec.bitwidth == 16:
            return 0.0
        weight = self.lowering.unit(unit).float()
        return float(
            output_error(weight, torch.zeros_like(weight) if spec.is_pruned else self.weight(unit, spec), None)
        )

    def dense_matrix(self, name: str, spec: QuantSpec) -> QuantizedMatrix:
        """Return the codes of one dense weight below 16 bits, rounded to nearest with clip search."""
        if (name, spec) in self._kept:
            return self._kept[(name, spec)]
        parts = [piece for _, piece in rounded_rows(self.lowering.dense_weight(name), spec)]
        minima = [piece.minima for piece in parts if piece.minima is not None]
        codes, scales = (torch.cat([getattr(piece, of) for piece in parts]) for of in ("codes", "scales"))
        return self._keep(name, spec, QuantizedMatrix(spec, codes, scales, torch.cat(minima) if minima else None))

    def dense_weight(self, name: str, spec: QuantSpec) -> torch.Tensor:
        """Return the dense weight that the runtime would compute with, float32."""
        if spec.bitwidth == 16:
            return self.lowering.dense_weight(name).float()
        return self.dense_matrix(name, spec).dequantize()

    def dense_error(self, name: str, spec: QuantSpec) -> float:
        """Return the squared weight error of one dense weight, 0 at 16 bits."""
        if spec.bitwidth == 16:
            return 0.0
        if (name, spec) not in self._dense_errors:
            total = 0.0
            for rows, piece in rounded_rows(self.lowering.dense_weight(name), spec):
                total += float((rows - piece.dequantize()).square().sum(dtype=torch.float64))
            self._dense_errors[(name, spec)] = total
        return self._dense_errors[(name, spec)]


def output_error(weight: Tensor, quantized_weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Return trace(D H D^T) with D = weight - quantized_weight, in the unit of the outputs squared, float32 [...].

    Let x be the inputs, g their router weights, H = sum of g^2 x x^T. It is the squared error of g D x over all inputs.
    Source: Optimal Brain Compression, section 3 (the layer-wise problem), with inputs weighted by routing.

    weight, quantized_weight: [..., N, K].
    second_moment: [..., K, K] symmetric, or None for the identity.
    """
    return row_errors(weight, quantized_weight, second_moment).sum(-1)


def row_errors(weight: Tensor, quantized_weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Return the part of each output row in `output_error`, float32 [..., N], never below 0."""
    difference = weight.float() - quantized_weight.float()
    if second_moment is None:
        return difference.square().sum(-1)
    weighted = torch.matmul(difference, second_moment.float())
    return weighted.mul_(difference).sum(-1).clamp_min_(0.0)


def relative_output_error(weight: Tensor, quantized_weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Return sqrt(trace(D H D^T) / trace(W H W^T)), float32 [...]: error over the outputs' norm, 0 for W = 0."""
    error = output_error(weight, quantized_weight, second_moment)
    size = output_error(weight, torch.zeros_like(weight), second_moment)
    return torch.where(size > 0, error / size, torch.zeros_like(size)).sqrt()
