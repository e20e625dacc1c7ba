"""Multiple-choice knapsack on convex hulls: one option per unit, least cost under a loss budget, or the reverse.

Costs and losses add up over units. The greedy choice over hull steps is therefore the optimum of the relaxed linear
program. It differs from the integer optimum by at most one step of one unit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """Costs and losses of all options.

    costs, losses: float64 [U, S], inf if unit u cannot take option s. Every unit has a finite option.
    """

    costs: np.ndarray
    losses: np.ndarray

    def totals(self, choice: np.ndarray) -> tuple[float, float]:
        """Return cost and predicted loss of a choice [U]."""
        rows = np.arange(len(choice))
        return float(self.costs[rows, choice].sum()), float(self.losses[rows, choice].sum())


@dataclass(frozen=True, slots=True)
class Step:
    """A step from one corner of a unit's lower convex hull to the next: less cost for more loss."""

    ratio: float
    unit: int
    option: int
    saved_cost: float
    added_loss: float


def hull_steps(costs: np.ndarray, losses: np.ndarray, unit: int) -> tuple[int, list[Step]]:
    """Return a unit's option of least loss, and its steps down the lower convex hull, least loss per cost first."""
    order = sorted(np.flatnonzero(np.isfinite(costs)).tolist(), key=lambda s: (losses[s], costs[s]))
    hull: list[int] = []
    for option in order:
        if hull and costs[option] >= costs[hull[-1]]:
            continue
        while len(hull) >= 2:
            first, second = hull[-2], hull[-1]
            slope = (losses[second] - losses[first]) / (costs[first] - costs[second])
            if (losses[option] - losses[second]) / (costs[second] - costs[option]) > slope:
                break
            hull.pop()
        hull.append(option)
    steps = []
    for before, after in itertools.pairwise(hull):
        saved, added = float(costs[before] - costs[after]), float(losses[after] - losses[before])
        steps.append(Step(added / saved, unit, after, saved, added))
    return hull[0], steps


def _all_steps(table: ChoiceTable) -> tuple[np.ndarray, list[Step]]:
    start = np.empty(len(table.costs), np.int64)
    steps: list[Step] = []
    for unit in range(len(table.costs)):
        start[unit], unit_steps = hull_steps(table.costs[unit], table.losses[unit], unit)
        steps += unit_steps
    # Stable in (ratio, unit), so that equal tables give equal plans.
    return start, sorted(steps, key=lambda step: (step.ratio, step.unit))


def least_cost(table: ChoiceTable, loss_budget: float) -> np.ndarray:
    """Return options [U] of least cost whose losses sum to at most `loss_budget`.

    If none does, return the least lossy choice.
    """
    choice, steps = _all_steps(table)
    remaining = loss_budget - table.totals(choice)[1]
    blocked: set[int] = set()
    for step in steps:
        if step.unit in blocked:
            continue
        if step.added_loss > remaining:
            # Later hull steps of this unit start from this one.
            blocked.add(step.unit)
            continue
        choice[step.unit] = step.option
        remaining -= step.added_loss
    return choice


def least_loss(table: ChoiceTable, cost_budget: float) -> np.ndarray | None:
    """Return options [U] of least predicted loss that cost at most `cost_budget`, or None if the cheapest costs more.

    It mirrors least_cost: from the cheapest choice, hull steps are undone, most loss per cost first.
    """
    start, steps = _all_steps(table)
    before, choice = _taken(start, steps)
    room = cost_budget - table.totals(choice)[0]
    if room < 0:
        return None
    blocked: set[int] = set()
    for step, option in zip(reversed(steps), reversed(before), strict=True):
        if step.unit in blocked:
            continue
        if step.saved_cost > room:
            blocked.add(step.unit)
            continue
        choice[step.unit] = option
        room -= step.saved_cost
    return choice


def _taken(start: np.ndarray, steps: list[Step]) -> tuple[list[int], np.ndarray]:
    """Return the option before each step, and the choice [U] after all steps."""
    choice, before = start.copy(), []
    for step in steps:
        before.append(int(choice[step.unit]))
        choice[step.unit] = step.option
    return before, choice
