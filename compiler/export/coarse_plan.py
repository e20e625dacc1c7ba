"""The plan of a bundle in the formats of another engine.

llama.cpp and mlx store one projection of all experts of a layer in one stack, which has one format. The stacks' formats
are a knapsack: the least predicted loss within the bytes of the bundle's experts. GPTQModel has a format per module, so
each matrix keeps its bitwidth and group size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moec.manifests.model import ExpertKey, UnitKey
from moec.manifests.quant import QuantSpec

from ..request.plan import CompilePlan
from ..search.knapsack import ChoiceTable, least_loss
from ..sensitivity.sensitivity import dense_groups
from .engine_formats import GPTQMODEL, EngineFormat, gptqmodel_format, offered_formats
from .engine_names import require_family, shares_gate_and_up

UnitLoss = Callable[[UnitKey, QuantSpec], float]
"""Predicted KL of a unit in a format of ours."""
_UNTOUCHED = {GPTQMODEL: ("embedding", "lm_head")}
"""Dense groups that an engine leaves at 16 bits."""


@dataclass(frozen=True)
class EnginePlan:
    """A bundle's plan for another engine.

    engine: one of `engine_formats.ENGINES`.
    plan: plan of the bundle.
    units: format of each projection of each expert.
    dense: format of each dense group, by its name. Routers and norms keep 16 bits.
    """

    engine: str
    plan: CompilePlan
    units: Mapping[UnitKey, EngineFormat]
    dense: Mapping[str, EngineFormat]

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in the engine."""
        shapes = (
            (engine_format, self.plan.model.unit_shape(unit.layer, unit.projection))
            for unit, engine_format in self.units.items()
        )
        return round(sum(engine_format.bytes_of(*shape) for engine_format, shape in shapes))

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits of an expert's weight in the engine, scales included."""
        return 8 * self.expert_bytes / self.plan.expert_weights

    @property
    def left_out(self) -> tuple[ExpertKey, ...]:
        """Experts that the bundle leaves out. The engine keeps them."""
        model, units = self.plan.model, self.plan.units
        return tuple(key for key in model.expert_keys() if units[model.units_of(key)[0]].is_pruned)

    def in_our_formats(self) -> CompilePlan:
        """Return the plan whose loss is measured: a format of ours for each of the engine's."""
        return replace(
            self.plan, units={unit: engine_format.stand_in for unit, engine_format in self.units.items()}, low_units={}
        )


def coarse_plan(engine: str, plan: CompilePlan, predicted: UnitLoss | None = None) -> EnginePlan:
    """Return a bundle's plan for an engine.

    predicted: losses for the knapsack of stacks. None: the loss of a stack falls to a quarter with each bit, and the
        bundle's mean bits tell how much it matters.
    Raises OptionError if the engine does not know the family.
    """
    require_family(engine, plan.model.family)
    units = _unit_formats(plan) if engine == GPTQMODEL else _stack_choice(engine, plan, predicted)
    return EnginePlan(engine, plan, {unit: units[unit] for unit in plan.units}, _dense_formats(engine, plan))


def stack_formats(engine: str, plan: CompilePlan) -> tuple[EngineFormat, ...]:
    """Return the formats that an engine offers to stacks of experts, fewest bits first."""
    return offered_formats(engine, _plain(plan), any(spec.is_mxfp4 for spec in plan.units.values()))


def _plain(plan: CompilePlan) -> QuantSpec:
    """Return the format of weights that keep 16 bits. Norms always do."""
    return plan.dense["final_norm"]


def _stack_choice(engine: str, plan: CompilePlan, predicted: UnitLoss | None) -> dict[UnitKey, EngineFormat]:
    """Return the formats of stacks of least predicted loss that take at most the bytes of the bundle's experts.

    If no choice takes so little, each stack has its smallest format.
    """
    formats, stacks = stack_formats(engine, plan), _stacks(plan)
    costs = np.full((len(stacks), len(formats)), np.inf)
    losses = np.full_like(costs, np.inf)
    for row, stack in enumerate(stacks):
        rows, columns = plan.model.unit_shape(stack[0].layer, stack[0].projection)
        loss = _stack_loss(plan, stack, predicted)
        for column, offered in enumerate(formats):
            if offered.fits(columns):
                costs[row, column] = len(stack) * offered.bytes_of(rows, columns)
                losses[row, column] = loss(offered)
    choice = least_loss(ChoiceTable(costs, losses), plan.expert_packed_bytes)
    if choice is None:
        choice = np.argmin(costs, axis=1)
    return {unit: formats[int(choice[row])] for row, stack in enumerate(stacks) for unit in stack}


def _stacks(plan: CompilePlan) -> list[list[UnitKey]]:
    """Return the units of each layer and projection."""
    stacks = defaultdict[tuple[int, str], list[UnitKey]](list)
    for unit in plan.units:
        stacks[unit.layer, unit.projection].append(unit)
    return list(stacks.values())


def _stack_loss(
    plan: CompilePlan, stack: Sequence[UnitKey], predicted: UnitLoss | None
) -> Callable[[EngineFormat], float]:
    """Return the function that predicts the loss of a stack in a format, in any unit that all stacks share.

    Without predictions: at the optimum of a search, equal bytes saved cost equal losses everywhere. Let a bit divide a
    loss by four. A stack of n weights with b bits in the bundle then loses in proportion to n 4^(b - t) at t bits.
    Source of the quarter: the error of uniform rounding, whose square halves twice with each bit.
    """
    if predicted is not None:
        return lambda offered: sum(predicted(unit, offered.stand_in) for unit in stack)
    rows, columns = plan.model.unit_shape(stack[0].layer, stack[0].projection)
    bits = [0.0 if spec.is_pruned else spec.bits_per_weight(columns) for spec in (plan.units[unit] for unit in stack)]
    mean_bits: float = sum(bits) / len(bits)
    return lambda offered: float(len(stack) * rows * columns * 4.0 ** (mean_bits - offered.bits))


def _unit_formats(plan: CompilePlan) -> dict[UnitKey, EngineFormat]:
    """Return GPTQModel's format of each matrix. Experts that are left out get the smallest format of their layer."""
    model, formats = plan.model, dict[UnitKey, EngineFormat]()
    for layer in model.expert_layers:
        present = [unit for unit in model.units_of_layer(layer) if not plan.units[unit].is_pruned]
        for unit in present:
            columns = model.unit_shape(layer, unit.projection)[1]
            formats[unit] = gptqmodel_format(plan.units[unit], columns, _plain(plan))
        for unit in model.units_of_layer(layer):
            if unit not in formats:
                formats[unit] = _smallest_of_layer(plan, present, unit)
    if shares_gate_and_up(model.family):
        for unit in [unit for unit in formats if unit.projection == "gate"]:
            other = UnitKey(unit.layer, unit.expert, "up")
            formats[unit] = formats[other] = max(
                formats[unit], formats[other], key=lambda engine_format: engine_format.bits
            )
    return formats


def _smallest_of_layer(plan: CompilePlan, present: Sequence[UnitKey], unit: UnitKey) -> EngineFormat:
    """Return the format of a matrix of an expert that is left out: that of the fewest bits that its layer has."""
    columns = plan.model.unit_shape(unit.layer, unit.projection)[1]
    specs = {plan.units[other] for other in present}
    formats = [gptqmodel_format(spec, columns, _plain(plan)) for spec in specs if spec.fits(columns)]
    return min(formats, key=lambda engine_format: engine_format.bits)


def _dense_formats(engine: str, plan: CompilePlan) -> dict[str, EngineFormat]:
    """Return the format of each dense group: that of most of its weights, or the nearest one with no fewer bits."""
    shapes, formats = plan.model.dense_shapes(), dict[str, EngineFormat]()
    for group in dense_groups(plan.model):
        weights = Counter[QuantSpec]()
        for name in group.tensors:
            weights[plan.dense[name]] += shapes[name][0] * shapes[name][1]
        columns = sorted({shapes[name][1] for name in group.tensors})
        formats[group.name] = _dense_format(engine, plan, weights.most_common(1)[0][0], columns)
    for name in _UNTOUCHED.get(engine, ()):
        if name in formats:
            formats[name] = gptqmodel_format(_plain(plan), 1, _plain(plan))
    return formats


def _dense_format(engine: str, plan: CompilePlan, spec: QuantSpec, columns: Sequence[int]) -> EngineFormat:
    """Return the format of dense weights that have a format of ours.

    Of the fewest code bits that are enough and fit all columns, it is the one nearest in bits per weight.
    """
    plain = _plain(plan)
    if engine == GPTQMODEL:
        return gptqmodel_format(spec if all(map(spec.fits, columns)) else plain, columns[0], plain)
    offered = [
        engine_format for engine_format in offered_formats(engine, plain, False) if not engine_format.needs_importance
    ]
    enough = [
        engine_format
        for engine_format in offered
        if engine_format.stand_in.bitwidth >= spec.bitwidth and all(map(engine_format.fits, columns))
    ]
    stored = spec.bits_per_weight(columns[0])
    return min(enough, key=lambda engine_format: (engine_format.stand_in.bitwidth, abs(engine_format.bits - stored)))
