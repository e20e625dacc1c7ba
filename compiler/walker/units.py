"""The experts of the layer that is loaded: what flows through them, their weights in every format, what each costs.

The cost of a format is the routing-weighted squared error that it makes at the layer's output, with the other
projections as they are: sum over tokens of g^2 |y' - y|^2, g the router weight. It is measured on a sample of each
expert's tokens and scaled to all of them.
Source: Optimal Brain Compression, section 3 (the layer-wise problem), taken at the output of the expert.
Shapes: N tokens of a batch, n tokens of an expert, D hidden, F expert width, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, ExpertsSpec, UnitKey
from moec.manifests.quant import QuantSpec

from ..calibration.second_moments import SecondMoments
from ..quantization.quantized import LEFT_OUT, QuantizedMatrix
from ..quantization.quantizers import quantizer as find_quantizer
from ..quantization.quantizers.gptq import prepare_inputs, quantize_gptq_batch
from ..reference.expert_module import gated, intermediate, projection_of
from ..workspace.parallel import Workers

SAMPLE_TOKENS = 128
"""Tokens of an expert that its errors are measured on, the first that it saw."""
_ROUTER_SHARE_UNSEEN = 1.0
Costs = dict[tuple[UnitKey, QuantSpec], float]
Matrices = dict[tuple[UnitKey, QuantSpec], QuantizedMatrix]


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """What a batch handed to the experts: x [N, D], experts [N, K], router weights [N, K]; real tokens only."""

    inputs: Tensor
    chosen: Tensor
    weights: Tensor


class LayerInputs:
    """Second moments of every projection's inputs of one layer, and a sample of the tokens of each expert."""

    def __init__(self, experts: ExpertsSpec, hidden_size: int, has_moments: bool = True) -> None:
        """has_moments: false where the quantizer asks for none; tokens are counted all the same."""
        count, self._has_moments = experts.count, has_moments
        hidden, width = (hidden_size, experts.width) if has_moments else (0, 0)
        self.moments = SecondMoments(
            [torch.zeros(count, hidden, hidden)],
            [torch.zeros(count, width, width)],
            [torch.zeros(count, dtype=torch.int64)],
        )
        self._samples: list[list[Tensor]] = [[] for _ in range(count)]
        self._weights: list[list[Tensor]] = [[] for _ in range(count)]
        self._fallback = torch.zeros(0, hidden_size)

    def add(self, module: Any, batch: ExpertInputs, pool: Workers) -> None:
        """Add a batch, experts side by side; module: the experts, whose gates the intermediates come from."""
        if len(self._fallback) < SAMPLE_TOKENS:
            self._fallback = torch.cat([self._fallback, batch.inputs[: SAMPLE_TOKENS - len(self._fallback)]])

        def one(expert: int) -> None:
            token, rank = torch.where(batch.chosen == expert)
            if len(token):
                self._add_expert(module, expert, batch.inputs[token], batch.weights[token, rank].unsqueeze(1))

        for _ in pool.in_order(one, range(len(self._samples))):
            pass

    def _add_expert(self, module: Any, expert: int, rows: Tensor, weight: Tensor) -> None:
        """Tokens of one expert. rows: [n, D], weight: [n, 1]."""
        if self._has_moments:
            self.moments.add(0, expert, rows * weight, intermediate(module, expert, rows) * weight)
        else:
            self.moments.tokens(0)[expert] += len(rows)
        room = SAMPLE_TOKENS - sum(map(len, self._samples[expert]))
        if room > 0:
            self._samples[expert].append(rows[:room].clone())
            self._weights[expert].append(weight[:room].clone())

    def sample(self, expert: int) -> tuple[Tensor, Tensor, float]:
        """Tokens of an expert [n, D], their router weights [n, 1], and how many tokens each stands for.

        An expert that saw none is judged on tokens of others, as if it had seen one of them.
        """
        if not self._samples[expert]:
            return self._fallback, torch.full((len(self._fallback), 1), _ROUTER_SHARE_UNSEEN), 1 / len(self._fallback)
        rows, weights = torch.cat(self._samples[expert]), torch.cat(self._weights[expert])
        return rows, weights, float(self.moments.tokens(0)[expert]) / len(rows)

    def of(self, expert: int) -> tuple[tuple[Tensor, Tensor], int]:
        """Moments of what gate and up read [1, D, D], and down [1, F, F], and the tokens behind them."""
        own = slice(expert, expert + 1)
        return (self.moments.of(0, "gate")[own], self.moments.of(0, "down")[own]), int(self.tokens[expert])

    @property
    def tokens(self) -> Tensor:
        """Tokens of each expert, [E] int64."""
        return self.moments.tokens(0)


@dataclass(frozen=True, slots=True)
class ExpertQuantizer:
    """How every expert of a layer is quantized. specs: below 16 bits, all that fit a projection are made."""

    layer: int
    quantizer: str
    specs: tuple[QuantSpec, ...]

    def run(self, expert: int, weights: Mapping[str, Tensor], moments: Sequence[Tensor], tokens: int) -> Matrices:
        """All projections in every format.

        weights: by projection, [N, K] float32. moments: of what gate and up read [1, D, D], and down [1, F, F]; empty
        tensors where the quantizer asks for none. tokens: that made them.
        """
        found: Matrices = {}
        for group, moment in zip((("gate", "up"), ("down",)), moments, strict=True):
            fitting = [spec for spec in self.specs if spec.fits(weights[group[0]].shape[1])]
            prepared = None
            if self.quantizer == "gptq" and tokens and fitting:
                prepared = prepare_inputs(moment, [tokens])  # the same for gate and up, and for every format
            for projection in group:
                weight = weights[projection].contiguous()
                for spec in fitting:
                    key = (UnitKey(self.layer, expert, projection), spec)
                    if self.quantizer == "gptq" and not spec.is_mxfp4:
                        counts = torch.tensor([tokens])
                        found[key] = quantize_gptq_batch(weight.unsqueeze(0), spec, moment, counts, prepared)[0]
                    else:
                        found[key] = find_quantizer(self.quantizer)(weight, spec, None, 0)
        return found


Elsewhere = Callable[[ExpertQuantizer, LayerInputs, Sequence[int]], Iterator[Matrices]]
"""Quantizes these experts of a layer on other machines, in order: same bits as `ExpertQuantizer.run` here."""


class LayerQuantizer:
    """Quantizes the experts of the loaded layer, one expert at a time, in every format on offer."""

    def __init__(
        self, module: Any, layer: int, quantizer: str, specs: Sequence[QuantSpec], elsewhere: Elsewhere | None = None
    ) -> None:
        """module: the layer's experts (`gate_up_proj` [E, 2F, D], `down_proj` [E, D, F]). specs: below 16 bits."""
        self._module, self._layer, self._elsewhere = module, layer, elsewhere
        self._quantizer = ExpertQuantizer(layer, quantizer, tuple(specs))

    def run(
        self, inputs: LayerInputs, pool: Workers, only: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Matrices, Costs]]:
        """Per expert, in order: its projections in every format that fits them, and what each costs.

        only: of these experts; None: of all.
        """
        experts = range(int(self._module.num_experts)) if only is None else only
        if self._elsewhere is None:
            results = pool.in_order(lambda expert: self._expert(expert, inputs), experts)
        else:
            made = zip(experts, self._elsewhere(self._quantizer, inputs, experts), strict=True)
            results = pool.in_order(lambda found: self._priced(*found, inputs), made)
        for expert, (matrices, costs) in zip(experts, results, strict=True):
            yield expert, matrices, costs

    def _expert(self, expert: int, inputs: LayerInputs) -> tuple[Matrices, Costs]:
        with torch.inference_mode():
            matrices = self._quantizer.run(expert, self._weights(expert), *inputs.of(expert))
        return self._priced(expert, matrices, inputs)

    def _priced(self, expert: int, matrices: Matrices, inputs: LayerInputs) -> tuple[Matrices, Costs]:
        with torch.inference_mode():
            return matrices, self._costs(expert, self._weights(expert), matrices, inputs)

    def _weights(self, expert: int) -> dict[str, Tensor]:
        return {name: projection_of(self._module, expert, name) for name in PROJECTIONS}

    def _costs(self, expert: int, weights: dict[str, Tensor], matrices: Matrices, inputs: LayerInputs) -> Costs:
        """Of every format, and of a down projection without weights: what leaving the expert out costs."""
        rows, share, scale = inputs.sample(expert)
        gate, up = rows @ weights["gate"].T, rows @ weights["up"].T
        middle = gated(self._module, expert, gate, up)
        costs: Costs = {}

        def add(unit: UnitKey, spec: QuantSpec, error: Tensor) -> None:
            costs[(unit, spec)] = float((error * share).square().sum(dtype=torch.float64)) * scale

        for (unit, spec), matrix in matrices.items():
            other = matrix.dequantize()
            if unit.projection == "down":
                error = middle @ (other - weights["down"]).T
            else:
                moved = (rows @ other.T, up) if unit.projection == "gate" else (gate, rows @ other.T)
                error = (gated(self._module, expert, *moved) - middle) @ weights["down"].T
            add(unit, spec, error)
        add(UnitKey(self._layer, expert, "down"), LEFT_OUT, middle @ weights["down"].T)
        return costs
