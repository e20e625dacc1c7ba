"""The table of the knapsack: the price of each option, and the plan of a choice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moec.compiler.request.targets import ByteWeights
from moec.compiler.search.knapsack import least_cost
from moec.compiler.search.space import dense_bytes
from moec.manifests.errors import ExecutionError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, ToyStore, toy_model, toy_space


def test_with_even_weights_the_cost_is_bytes() -> None:
    space = toy_space()
    for budget in (0.0, 0.05, np.inf):
        choice = least_cost(space.table, budget)
        plan = space.plan(choice)
        matrices = sum(dense_bytes(plan, group, plan.dense) for group in space.groups)
        assert space.table.totals(choice)[0] == pytest.approx(plan.expert_packed_bytes + matrices)


def test_bytes_of_an_expert_count_as_often_as_it_is_read() -> None:
    model = toy_model()
    weights = np.ones((2, 4))
    weights[1, 2] = 3.0
    even, read = toy_space(model), toy_space(model, ByteWeights(weights, 1.0))
    ratio = read.table.costs / np.where(np.isfinite(even.table.costs), even.table.costs, 1.0)
    for row, unit in enumerate(read.units):
        finite = np.isfinite(read.table.costs[row])
        assert np.allclose(ratio[row][finite], 3.0 if unit[:2] == (1, 2) else 1.0)


def test_norms_and_routers_keep_16_bits_in_every_plan() -> None:
    plan = toy_space().plan(least_cost(toy_space().table, np.inf))
    assert {plan.dense[name].bitwidth for name in plan.dense if "norm" in name or "router" in name} == {16}
    assert plan.dense["embedding"].bitwidth == 4


def test_formats_that_do_not_fit_are_left_out_of_a_row() -> None:
    space = toy_space(toy_model(hidden=64, width=96), specs=(QuantSpec(2, 64), QuantSpec(3, 32), BF16))
    plan = space.plan(least_cost(space.table, np.inf))
    formats = {projection: str(plan.units[unit]) for unit in plan.units for projection in [unit.projection]}
    assert formats == {"gate": "q2g64", "up": "q2g64", "down": "q3g32"}


def test_a_size_target_counts_routed_experts_alone() -> None:
    space = toy_space(weights=ByteWeights(np.full((2, 4), 7.0), 5.0))
    table = space.size_table()
    units = len(space.units)
    assert np.all(table.costs[units:][np.isfinite(table.costs[units:])] == 0)
    choice = least_cost(space.table, 0.05)
    assert table.totals(choice)[0] == space.plan(choice).expert_packed_bytes


def test_a_prediction_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons with it are false, so a knapsack would take the cheapest format of the unit."""
    known = ToyStore.error

    def broken(store: ToyStore, unit: UnitKey, spec: QuantSpec) -> float:
        return math.nan if (unit.layer, unit.expert, spec.bitwidth) == (1, 2, 4) else known(store, unit, spec)

    monkeypatch.setattr(ToyStore, "error", broken)
    with pytest.raises(ExecutionError, match=r"the predicted loss of `.*` is not a number"):
        toy_space()
