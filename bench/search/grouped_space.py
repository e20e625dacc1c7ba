"""A search space in which groups of matrices share one format: simpler plans, found by the same search."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moec.compiler.request.plan import CompilePlan
from moec.compiler.search.knapsack import ChoiceTable
from moec.compiler.search.space import SearchSpace
from moec.manifests.model import UnitKey

Grouping = Callable[[UnitKey], Hashable]
"""Names the group of a matrix."""


def by_layer_and_projection(unit: UnitKey) -> tuple[int, str]:
    """Name the group of all experts of a layer in one projection."""
    return unit.layer, unit.projection


@dataclass(frozen=True, slots=True)
class GroupedSpace(SearchSpace):
    """A search space whose rows are groups of units, followed by dense groups.

    single: the same space with rows of units.
    row_of: row of each unit, [U].
    """

    single: SearchSpace
    row_of: np.ndarray

    def plan(self, choice: Sequence[int] | np.ndarray) -> CompilePlan:
        """Return the plan of a choice, one format per group."""
        chosen = np.asarray(choice)
        groups = int(self.row_of.max()) + 1
        return self.single.plan(np.concatenate([chosen[self.row_of], chosen[groups:]]))

    @property
    def num_factors(self) -> int:
        return self.single.num_factors

    def rescaled(self, factors: np.ndarray) -> SearchSpace:
        """Return the space with rescaled predictions. factors: one per unit, then one per dense group."""
        return _with_rows(self.single.rescaled(factors), self.row_of)

    def size_table(self) -> ChoiceTable:
        return _summed(self.single.size_table(), self.row_of)


def grouped(space: SearchSpace, group_of: Grouping) -> GroupedSpace:
    """Return the space in which all units of a group have one format. No expert is left out."""
    single = space.without_pruning()
    rows: dict[Hashable, int] = {}
    row_of = np.array([rows.setdefault(group_of(unit), len(rows)) for unit in single.units])
    return _with_rows(single, row_of)


def with_formats(space: SearchSpace, is_offered: Callable[[int], bool]) -> SearchSpace:
    """Return the space of units with a part of the formats.

    is_offered: tells for a column of the units whether it stays.
    """
    single = space.without_pruning()
    costs, units = single.table.costs.copy(), len(single.units)
    gone = [column for column in range(len(single.unit_specs)) if not is_offered(column)]
    costs[:units, gone] = np.inf
    losses = single.table.losses.copy()
    losses[:units, gone] = np.inf
    return replace(single, table=ChoiceTable(costs, losses))


def _with_rows(single: SearchSpace, row_of: np.ndarray) -> GroupedSpace:
    table = _summed(single.table, row_of)
    parts = single.plain, single.units, single.unit_specs, single.groups, single.dense_options
    return GroupedSpace(*parts, table, single, row_of)


def _summed(table: ChoiceTable, row_of: np.ndarray) -> ChoiceTable:
    """Add up the rows of each group. Rows after those of the units stay. A format that one unit cannot take is lost."""
    costs, losses = (_sums(values, row_of) for values in (table.costs, table.losses))
    return ChoiceTable(costs, losses)


def _sums(values: np.ndarray, row_of: np.ndarray) -> np.ndarray:
    sums = np.zeros((int(row_of.max()) + 1, values.shape[1]))
    np.add.at(sums, row_of, values[: len(row_of)])
    return np.concatenate([sums, values[len(row_of) :]])
