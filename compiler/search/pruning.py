"""Pruned experts: knapsack rows that hold a whole expert, with one more option that leaves the expert out.

The router of its layer then chooses among the other experts. Costs and losses of an expert's units add up. Its lower
convex hull therefore consists of the steps of its units' hulls, ordered by loss per cost.
The option of leaving it out is one more point. Its predicted loss is that of a down projection without weights, which
does not change the choice of the other experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.model import ExpertKey, ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec

from ..quantization.quantized import LEFT_OUT
from ..quantization.unit_store import UnitStore
from ..request.options import CompileOptions
from ..request.plan import CompilePlan
from ..request.targets import ByteWeights
from ..sensitivity.sensitivity import SensitivityTable
from ..sensitivity.unit_prices import LEAST_TOKENS
from .knapsack import ChoiceTable, hull_steps
from .space import SearchSpace, dense_bytes


@dataclass(frozen=True, slots=True)
class PrunableSpace(SearchSpace):
    """A search space whose rows are experts, followed by dense groups.

    options: per expert, the formats of its units in each column.
    units_alone: the same space with rows of units, without pruning.
    left_out: predicted losses of the experts that may be left out.
    weights: cost of a byte.
    """

    options: tuple[tuple[Mapping[UnitKey, QuantSpec], ...], ...]
    units_alone: SearchSpace
    left_out: Mapping[ExpertKey, float]
    weights: ByteWeights

    def plan(self, choice: Sequence[int] | np.ndarray) -> CompilePlan:
        """Return the plan of a choice, one option per row."""
        units: dict[UnitKey, QuantSpec] = {}
        for row, options in enumerate(self.options):
            units.update(options[int(choice[row])])
        ordered = {unit: units[unit] for unit in self.plain.units}
        return replace(self.plain, units=ordered, dense=self.dense_of(choice[len(self.options) :]))

    def without_pruning(self) -> SearchSpace:
        return self.units_alone

    @property
    def num_factors(self) -> int:
        return self.units_alone.num_factors + len(self.left_out)

    def rescaled(self, factors: np.ndarray) -> SearchSpace:
        """Return the space with rescaled predictions.

        factors: first of units and dense groups, then of leaving out each expert of `left_out`.
        """
        count = self.units_alone.num_factors
        losses = {
            key: loss * float(factor)
            for (key, loss), factor in zip(self.left_out.items(), factors[count:], strict=True)
        }
        return with_pruning(self.units_alone.rescaled(factors[:count]), losses, self.weights)

    def size_table(self) -> ChoiceTable:
        alone = self.units_alone.size_table()
        costs = np.full_like(self.table.costs, np.inf)
        for row, options in enumerate(self.options):
            for column, option in enumerate(options):
                costs[row, column] = sum(self._bytes(unit, spec) for unit, spec in option.items())
        groups = alone.costs[len(self.units) :]
        costs[len(self.options) :, : groups.shape[1]] = groups
        return ChoiceTable(costs, self.table.losses)

    def _bytes(self, unit: UnitKey, spec: QuantSpec) -> float:
        rows, columns = self.plain.model.unit_shape(unit.layer, unit.projection)
        return rows * spec.row_bytes(columns)


def with_pruning(space: SearchSpace, losses: Mapping[ExpertKey, float], weights: ByteWeights) -> PrunableSpace:
    """Return a space whose experts may be left out.

    Tokens that would choose a pruned expert read another expert instead. Pruning therefore saves only the size part
    of its cost. The rest stays, counted for an expert in the smallest form of this one.
    losses: predicted losses of the experts that may be left out.
    weights: see `build_space`.
    """
    model, row_of = space.plain.model, {unit: row for row, unit in enumerate(space.units)}
    options, costs, priced = [], [], []
    for key in model.expert_keys():
        units_of_expert = model.units_of(key)
        points = _sums([row_of[unit] for unit in units_of_expert], space.table)
        formats = ([space.unit_specs[column] for column in columns] for *_, columns in points)
        choices = [dict(zip(units_of_expert, specs, strict=True)) for specs in formats]
        if key in losses:
            choices.append(dict.fromkeys(units_of_expert, LEFT_OUT))
            reads = 1 - weights.size_share / float(weights.experts[key.layer, key.expert])
            points.append((max(reads, 0.0) * points[-1][0], losses[key], ()))
        options.append(tuple(choices))
        costs.append([cost for cost, *_ in points])
        priced.append([loss for _, loss, _ in points])
    groups = slice(len(space.units), None)
    table = ChoiceTable(
        _rows([*costs, *space.table.costs[groups].tolist()]), _rows([*priced, *space.table.losses[groups].tolist()])
    )
    return PrunableSpace(
        space.plain, space.units, space.unit_specs, space.groups, space.dense_options, table, tuple(options), space,
        losses, weights,
    )  # fmt: skip


def _sums(rows: Sequence[int], table: ChoiceTable) -> list[tuple[float, float, tuple[int, ...]]]:
    """Return the hull of total cost and loss of these rows, least loss first, with the option of each row."""
    hulls = [hull_steps(table.costs[row], table.losses[row], at) for at, row in enumerate(rows)]
    chosen = [start for start, _ in hulls]
    points = [_total(table, rows, chosen)]
    for step in sorted((step for _, steps in hulls for step in steps), key=lambda step: (step.ratio, step.unit)):
        chosen[step.unit] = step.option
        points.append(_total(table, rows, chosen))
    return points


def _total(table: ChoiceTable, rows: Sequence[int], chosen: Sequence[int]) -> tuple[float, float, tuple[int, ...]]:
    cost = sum(float(table.costs[row, option]) for row, option in zip(rows, chosen, strict=True))
    loss = sum(float(table.losses[row, option]) for row, option in zip(rows, chosen, strict=True))
    return cost, loss, tuple(chosen)


def _rows(values: Sequence[Sequence[float]]) -> np.ndarray:
    """Return rows of different lengths as a matrix, padded with infinity."""
    matrix = np.full((len(values), max(map(len, values))), np.inf)
    for row, numbers in enumerate(values):
        matrix[row, : len(numbers)] = numbers
    return matrix


def prunes(options: CompileOptions, model: ModelSpec, has_gradients: bool) -> bool:
    """Return whether experts may be left out.

    Without a request: if a measured loss or KL decides, and gradients set the price. With prices from output error
    alone, plans get larger: 1.73 instead of 1.57 bits per weight
    (docs/experiments/2026-11.md, 22: Gradients layer by layer).
    Raises OptionError if pruning is requested and impossible.
    """
    refusal = None
    if not any(layer.experts.can_lose_experts for layer in model.layers):
        refusal = "the routers of this model need all of their experts"
    if options.prune and refusal is not None:
        raise OptionError(f"`--prune-experts`: {refusal}", "leave it out")
    is_measured = options.target.kind in ("loss", "kl") and options.search == "knapsack"
    return refusal is None and (is_measured and has_gradients if options.prune is None else options.prune)


def left_out_losses(
    store: UnitStore, sensitivity: SensitivityTable, popularity: np.ndarray | None
) -> dict[ExpertKey, float]:
    """Return the predicted KL of leaving out each expert that calibration knows and that its router can lose.

    popularity: tokens, [L, E].
    """
    if popularity is None:
        return {}
    known = (key for key in store.model.expert_keys() if popularity[key.layer, key.expert] >= LEAST_TOKENS)
    priced = sensitivity.predicted  # gradients may have too little data on an expert
    losses = {
        key: sensitivity.unit_loss(store, UnitKey(*key, "down"), LEFT_OUT)
        for key in known
        if priced is None or (UnitKey(*key, "down"), LEFT_OUT) in priced
    }
    return prunable(losses, store.model)


def prunable(losses: Mapping[ExpertKey, float], model: ModelSpec) -> dict[ExpertKey, float]:
    """Return, in each layer, the experts that are cheapest to leave out, as many as its router can lose."""
    cheapest_of_all: dict[ExpertKey, float] = {}
    for layer, spec in enumerate(model.layers):
        of_layer = [key for key in losses if key.layer == layer] if spec.experts.can_lose_experts else []
        cheapest = sorted(of_layer, key=lambda key: (losses[key], key))[: spec.experts.count - spec.experts.top_k]
        cheapest_of_all.update({key: losses[key] for key in cheapest})
    return cheapest_of_all


def kl_by_part(space: SearchSpace, plan: CompilePlan) -> list[dict[str, Any]]:
    """Return the predicted KL in nats per token and the packed bytes of each part of a plan, as plain values.

    Attention includes the dense FFN of a layer without experts. The last part always has 16 bits.
    plan: any plan in formats of the space.
    """
    alone = space.without_pruning()
    routed, fixed = "routed experts", "norms and routers"
    kl, size = defaultdict[str, float](float), Counter({routed: plan.expert_packed_bytes})
    if isinstance(space, PrunableSpace):
        kl[routed] = sum(loss for key, loss in space.left_out.items() if plan.units[UnitKey(*key, "down")] == LEFT_OUT)
    for row, unit in enumerate(alone.units):
        if plan.units[unit] != LEFT_OUT:
            kl[routed] += alone.table.losses[row, alone.unit_specs.index(plan.units[unit])]
    for row, group in enumerate(alone.groups, len(alone.units)):
        name = group.name.rpartition(".")[2]
        part = "shared experts" if name == "shared" else name
        formats = {name: plan.dense[name] for name in group.tensors}
        options = [{name: option[name] for name in group.tensors} for option in alone.dense_options]
        kl[part] += alone.table.losses[row, options.index(formats)]
        size[part] += int(dense_bytes(plan, group, formats))
    size[fixed] = plan.dense_packed_bytes - sum(count for part, count in size.items() if part != routed)
    return [{"part": part, "kl": float(kl[part]), "bytes": count} for part, count in size.items()]
