"""The table of the knapsack: predicted loss and cost of every option of every unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moec.manifests.errors import ExecutionError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..request.targets import ByteWeights
from ..sensitivity.sensitivity import DenseGroup, SensitivityTable, dense_groups
from .knapsack import ChoiceTable

_LEAST_BITS = 2.0
"""Below two bits the losses of formats say less about an expert than about the format."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The knapsack of one model. Rows are units, followed by dense groups. Columns are options.

    plain: the plan at 16 bits.
    units: unit of each of the first rows.
    unit_specs: format of each column for units.
    groups: dense group of each of the remaining rows.
    dense_options: formats of each column for dense groups, as mappings name -> format.
    table: costs and losses.
    """

    plain: CompilePlan
    units: tuple[UnitKey, ...]
    unit_specs: tuple[QuantSpec, ...]
    groups: tuple[DenseGroup, ...]
    dense_options: tuple[Mapping[str, QuantSpec], ...]
    table: ChoiceTable

    def plan(self, choice: Sequence[int] | np.ndarray) -> CompilePlan:
        """Return the plan of a choice [U]."""
        units = {unit: self.unit_specs[int(choice[row])] for row, unit in enumerate(self.units)}
        return replace(self.plain, units=units, dense=self.dense_of(choice[len(self.units) :]))

    def without_pruning(self) -> SearchSpace:
        """Return the space whose rows are units, all of them kept."""
        return self

    @property
    def num_factors(self) -> int:
        """Number of predictions that `rescaled` multiplies."""
        return len(self.table.losses)

    def rescaled(self, factors: np.ndarray) -> SearchSpace:
        """Return the same space with predicted losses multiplied.

        factors: [num_factors], here one per row.
        """
        return replace(self, table=ChoiceTable(self.table.costs, self.table.losses * factors[:, None]))

    def dense_of(self, choice: Sequence[int] | np.ndarray) -> dict[str, QuantSpec]:
        """Return the format of every dense weight.

        choice: column of each dense group.
        """
        dense = dict(self.plain.dense)
        for group, column in zip(self.groups, choice, strict=True):
            dense.update({name: self.dense_options[int(column)][name] for name in group.tensors})
        return dense

    def size_table(self) -> ChoiceTable:
        """Return a table for size and bits targets: costs are bytes of routed experts, and dense rows are free."""
        costs = np.full_like(self.table.costs, np.inf)
        for row, unit in enumerate(self.units):
            rows, columns = self.plain.model.unit_shape(unit.layer, unit.projection)
            for column, spec in enumerate(self.unit_specs):
                if np.isfinite(self.table.costs[row, column]):
                    costs[row, column] = rows * spec.row_bytes(columns)
        costs[len(self.units) :] = np.where(np.isfinite(self.table.costs[len(self.units) :]), 0.0, np.inf)
        return ChoiceTable(costs, self.table.losses)


def build_space(
    plain: CompilePlan,
    store: UnitStore,
    sensitivity: SensitivityTable,
    weights: ByteWeights,
    unit_specs: Sequence[QuantSpec],
    dense_options: Sequence[Mapping[str, QuantSpec]],
) -> SearchSpace:
    """Price all options.

    unit_specs: formats on offer to units. A unit that none of them holds keeps 16 bits.
    dense_options: formats of all dense weights, one mapping per bitwidth on offer. A single one fixes them.
    Raises ExecutionError for a prediction that is not a number: a knapsack would take the smallest plan.
    """
    units, groups = tuple(plain.units), dense_groups(plain.model)
    width = max(len(unit_specs) + 1, len(dense_options))
    costs = np.full((len(units) + len(groups), width), np.inf)
    losses = np.full_like(costs, np.inf)
    formats, has_last_resort = tuple(unit_specs), False
    for row, unit in enumerate(units):
        rows, columns = plain.model.unit_shape(unit.layer, unit.projection)
        byte_weight = weights.experts[unit.layer, unit.expert]
        for column, spec in enumerate(formats):
            loss = sensitivity.unit_loss(store, unit, spec) if spec.fits(columns) else np.inf
            if loss != np.inf:
                costs[row, column] = byte_weight * rows * spec.row_bytes(columns)
                losses[row, column] = loss
        if not np.isfinite(costs[row]).any():
            has_last_resort = True
            costs[row, len(formats)] = byte_weight * rows * plain.units[unit].row_bytes(columns)
            losses[row, len(formats)] = 0.0
    if has_last_resort:
        formats = (*formats, next(iter(plain.units.values())))
    width = max(len(formats), len(dense_options))
    costs, losses = costs[:, :width], losses[:, :width]
    for row, group in enumerate(groups, len(units)):
        for column, specs in enumerate(dense_options):
            costs[row, column] = weights.dense * dense_bytes(plain, group, specs)
            losses[row, column] = sensitivity.dense_loss(store, group, specs)
    if np.isnan(losses).any():
        row = int(np.argmax(np.isnan(losses).any(axis=1)))
        place = str(units[row]) if row < len(units) else groups[row - len(units)].name
        raise ExecutionError(
            f"the predicted loss of `{place}` is not a number", "check the checkpoint for weights that are not finite"
        )
    # Of two options with exactly equal loss the cheaper wins, so that the choice does not depend on their order.
    table = ChoiceTable(costs, losses)
    return SearchSpace(plain, units, formats, groups, tuple(dense_options), table)


def dense_bytes(plain: CompilePlan, group: DenseGroup, specs: Mapping[str, QuantSpec]) -> float:
    """Return the packed bytes of one dense group."""
    shapes = plain.model.dense_shapes()
    return sum(shapes[name][0] * specs[name].row_bytes(shapes[name][-1]) for name in group.tensors)


def expert_losses(space: SearchSpace) -> dict[str, Any] | None:
    """Return the predicted KL of each expert if all its projections have one format, as plain values.

    It is the offered format of fewest bits, two at least, that fits all units. None without one.
    """
    alone = space.without_pruning()
    losses, model = alone.table.losses[: len(alone.units), : len(alone.unit_specs)], alone.plain.model
    fitting = [column for column in range(losses.shape[1]) if np.isfinite(losses[:, column]).all()]
    if not fitting or not alone.units:
        return None
    most = max(model.unit_shape(unit.layer, unit.projection)[1] for unit in alone.units)
    bits = {column: alone.unit_specs[column].bits_per_weight(most) for column in fitting}
    enough = [column for column in fitting if bits[column] >= _LEAST_BITS] or fitting
    column = min(enough, key=lambda offered: bits[offered])
    table = np.full((model.num_layers, max(layer.experts.count for layer in model.layers)), np.nan)
    for unit, loss in zip(alone.units, losses[:, column], strict=True):
        before = table[unit.layer, unit.expert]
        table[unit.layer, unit.expert] = loss if np.isnan(before) else before + loss
    # A layer has as many values as experts.
    rows = [[float(value) for value in row if not np.isnan(value)] for row in table]
    return {"format": str(alone.unit_specs[column]), "losses": rows}
