"""The experts of a layer in every format on offer, and what each format costs.

The cost of a format is the routing-weighted squared error that it causes at the layer's output. The other projections
stay as they are. With the router weight g, it is

    sum over tokens of g^2 |y' - y|^2.

It is measured on a sample of each expert's tokens and scaled to all of them. Without texts it is the squared error of
the weights.
Source: Optimal Brain Compression, section 3 (the layer-wise problem), taken at the output of the expert.
Shapes: n tokens of an expert, D hidden, F expert width, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.manifests.errors import CheckpointError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..calibration.layer_inputs import LayerInputs
from ..reference.expert_module import activated, first_products, projections_of
from ..walker.torch_device import CPU
from ..workspace.parallel import Workers
from .own_codes import ExactMatrices, no_codes
from .quantized import LEFT_OUT, QuantizedMatrix, RangeExceeded
from .quantizers import PACKAGES
from .quantizers import quantizer as find_quantizer
from .quantizers.gptq import PreparedInputs, prepare_inputs, quantize_formats

Costs = dict[tuple[UnitKey, QuantSpec], float]
Matrices = dict[tuple[UnitKey, QuantSpec], QuantizedMatrix]
Moments = tuple[Tensor, Tensor]
"""Second moments of the inputs of gate and up [D, D], and of down [F, F]."""


@dataclass(frozen=True, slots=True)
class ExpertQuantizer:
    """The way in which every expert of a layer is quantized.

    specs: formats below 16 bits. A projection gets each format that fits it.
    """

    layer: int
    quantizer: str
    specs: tuple[QuantSpec, ...]

    def run(
        self,
        expert: int,
        weights: Mapping[str, Tensor],
        moments: Moments | None,
        tokens: int,
        exact: ExactMatrices = no_codes,
    ) -> Matrices:
        """Return all projections of an expert in every format whose scales hold them.

        weights: by projection, [N, K] float32.
        moments: of the expert's inputs, or None. Not all quantizers use them.
        tokens: number of tokens in the moments.
        exact: gives units in formats that hold the checkpoint's own codes. They are not quantized.
        Raises CheckpointError if GPTQ is to use moments that are not finite.
        """
        matrices: Matrices = {}
        for group, at in ((("gate", "up"), 0), (("down",), 1)):
            units = {UnitKey(self.layer, expert, name): weights[name] for name in group if name in weights}
            columns = next(iter(units.values())).shape[1]
            own_codes: Matrices = {}
            for unit in units:
                for spec, matrix in exact(unit, self.specs).items():
                    own_codes[unit, spec] = matrix.to(weights[unit.projection].device)
            fitting = [spec for spec in self.specs if spec.fits(columns)]
            rounded = [spec for spec in fitting if any((unit, spec) not in own_codes for unit in units)]
            moment, prepared = None if moments is None else moments[at], None
            if self.quantizer == "gptq" and moment is not None and tokens and rounded:
                if not moment.isfinite().all():
                    raise CheckpointError(
                        f"layer {self.layer}, expert {expert}: expected finite squares of the inputs of "
                        f"{' and '.join(group)} on the calibration texts, found some beyond float32",
                        "check the checkpoint for weights that are too large",
                    )
                prepared = prepare_inputs(moment, tokens)  # shared by every format
            # Projections of the same inputs are rounded as one matrix: rows are independent, and calls are fewer.
            try:
                matrices |= self._rounded(units, rounded, moment, tokens, prepared)
            except RangeExceeded:
                for unit, weight in units.items():
                    for spec in rounded:
                        with suppress(RangeExceeded):
                            matrices |= self._rounded({unit: weight}, [spec], moment, tokens, prepared)
            matrices.update(own_codes)
        return matrices

    def _rounded(
        self,
        units: Mapping[UnitKey, Tensor],
        specs: Sequence[QuantSpec],
        moment: Tensor | None,
        tokens: int,
        prepared: PreparedInputs | None,
    ) -> Matrices:
        """Round units of the same inputs as one matrix. Raises RangeExceeded if a format does not hold one of them."""
        weight = torch.cat(list(units.values()))
        matrices: Matrices = {}
        by_gptq = [spec for spec in specs if self.quantizer == "gptq" and not spec.is_mxfp4]
        by_format = dict(zip(by_gptq, quantize_formats(weight, by_gptq, moment, tokens, prepared), strict=True))
        by_format |= {spec: self._by_name(weight, spec, moment, tokens) for spec in specs if spec not in by_format}
        for spec in specs:
            start = 0
            for unit, rows in units.items():
                matrices[unit, spec] = by_format[spec].rows(start, start + len(rows))
                start += len(rows)
        return matrices

    def _by_name(self, weight: Tensor, spec: QuantSpec, moment: Tensor | None, tokens: int) -> QuantizedMatrix:
        """Quantize one matrix. Quantizers of other packages compute on the CPU."""
        if self.quantizer not in PACKAGES:
            return find_quantizer(self.quantizer)(weight, spec, moment, tokens)
        host = None if moment is None else moment.cpu()
        return find_quantizer(self.quantizer)(weight.cpu(), spec, host, tokens).to(weight.device)


QuantizeElsewhere = Callable[[ExpertQuantizer, LayerInputs | None, Sequence[int]], Iterator[Matrices]]
"""Quantizes experts of a layer on other machines, in order, with the bits of `ExpertQuantizer.run`."""


class LayerQuantizer:
    """Quantizes the experts of a loaded layer, one expert at a time.

    module: the experts of the layer.
    quantizer: how each is quantized.
    elsewhere: other machines that quantize, or None for the threads of this process.
    exact: gives units in formats that hold the checkpoint's own codes. Other machines have it from their checkpoint.
    """

    def __init__(
        self,
        module: Any,
        quantizer: ExpertQuantizer,
        elsewhere: QuantizeElsewhere | None = None,
        exact: ExactMatrices = no_codes,
    ) -> None:
        self._module, self._quantizer, self._elsewhere, self._exact = module, quantizer, elsewhere, exact

    def run(
        self, inputs: LayerInputs | None, pool: Workers, only: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Matrices, Costs]]:
        """Yield each expert, in order: its projections in every format that fits them, and the cost of each.

        inputs: what texts hand to the experts; None without texts.
        only: these experts, or None for all.
        """
        experts = range(int(self._module.num_experts)) if only is None else only
        if self._elsewhere is None:
            results = pool.in_order(lambda expert: self._quantized_here(expert, inputs), experts)
        else:
            jobs = zip(experts, self._elsewhere(self._quantizer, inputs, experts), strict=True)
            results = pool.in_order(lambda job: (job[1], self._costs(*job, inputs)), jobs)
        for expert, (matrices, costs) in zip(experts, results, strict=True):
            yield expert, matrices, costs

    def _quantized_here(self, expert: int, inputs: LayerInputs | None) -> tuple[Matrices, Costs]:
        moments, tokens = (None, 0) if inputs is None else inputs.moments_of(expert)
        with torch.inference_mode():
            weights = projections_of(self._module, expert)
            matrices = self._quantizer.run(expert, weights, moments, tokens, self._exact)
        costs = self._costs(expert, matrices, inputs)
        return {key: matrix.to(CPU) for key, matrix in matrices.items()}, costs

    @torch.inference_mode()
    def _costs(self, expert: int, matrices: Matrices, inputs: LayerInputs | None) -> Costs:
        """Return the cost of every format, and of a down projection without weights: that of pruning the expert."""
        weights = projections_of(self._module, expert)
        if inputs is None:
            return {
                (unit, spec): float((matrix.dequantize() - weights[unit.projection]).square().sum())
                for (unit, spec), matrix in matrices.items()
            } | {(self._down(expert), LEFT_OUT): float(weights["down"].square().sum())}
        rows, share, scale = inputs.sample(expert)
        products = first_products(self._module, expert, rows)
        middle = activated(self._module, expert, products)
        costs: Costs = {}

        def add(unit: UnitKey, spec: QuantSpec, error: Tensor) -> None:
            costs[(unit, spec)] = float((error * share).square().sum(dtype=torch.float64)) * scale

        for (unit, spec), matrix in matrices.items():
            other = matrix.dequantize()
            if unit.projection == "down":
                error = middle @ (other - weights["down"]).T
            else:
                moved = activated(self._module, expert, {**products, unit.projection: rows @ other.T})
                error = (moved - middle) @ weights["down"].T
            add(unit, spec, error)
        add(self._down(expert), LEFT_OUT, middle @ weights["down"].T)
        return costs

    def _down(self, expert: int) -> UnitKey:
        return UnitKey(self._quantizer.layer, expert, "down")
