"""The knapsack against brute force on small tables, and the table of a search: the price of each option."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.request.targets import ByteWeights
from moec.compiler.search.knapsack import ChoiceTable, hull_steps, least_cost, least_loss
from moec.compiler.search.space import dense_bytes
from moec.manifests.errors import ExecutionError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, ToyStore, toy_model, toy_space

# Whole numbers have exact sums, so only slopes need a tolerance.
NUMBERS = st.integers(0, 60).map(float)


@st.composite
def tables(draw: st.DrawFn, most_units: int = 4, most_options: int = 4) -> ChoiceTable:
    """Draw tables of up to 256 plans. Some options are not available."""
    units, options = draw(st.integers(1, most_units)), draw(st.integers(1, most_options))
    costs, losses = (
        np.array(draw(st.lists(NUMBERS, min_size=units * options, max_size=units * options))).reshape(units, options)
        for _ in range(2)
    )
    for unit in range(units):
        taken = draw(st.integers(0, options - 1))
        for option in range(options):
            if option != taken and draw(st.booleans()):
                costs[unit, option] = losses[unit, option] = np.inf
    return ChoiceTable(costs, losses)


def all_plans(table: ChoiceTable) -> list[tuple[float, float]]:
    """Return (cost, loss) of every plan."""
    finite = [np.flatnonzero(np.isfinite(row)).tolist() for row in table.costs]
    return [table.totals(np.array(choice)) for choice in itertools.product(*finite)]


def largest_step(table: ChoiceTable) -> tuple[float, float]:
    """Return the cost that the largest hull step saves, and the loss that it adds."""
    units = range(len(table.costs))
    steps = [step for unit in units for step in hull_steps(table.costs[unit], table.losses[unit], unit)[1]]
    return max((s.saved_cost for s in steps), default=0.0), max((s.added_loss for s in steps), default=0.0)


def is_possible(table: ChoiceTable, choice: np.ndarray) -> bool:
    return bool(np.isfinite(table.costs[np.arange(len(choice)), choice]).all())


@given(tables(), st.floats(-5, 150))
def test_least_cost_keeps_the_loss_budget(table: ChoiceTable, budget: float) -> None:
    choice = least_cost(table, budget)
    assert is_possible(table, choice)
    cost, loss = table.totals(choice)
    plans = all_plans(table)
    least = min(loss for _, loss in plans)
    if least > budget:
        assert loss == least
        return
    assert loss <= budget + 1e-9
    best = min(cost for cost, loss in plans if loss <= budget)
    assert best <= cost <= best + largest_step(table)[0] + 1e-9


@given(tables(), st.floats(-5, 260))
def test_least_loss_keeps_the_cost_budget(table: ChoiceTable, budget: float) -> None:
    choice = least_loss(table, budget)
    plans = all_plans(table)
    if choice is None:
        assert min(cost for cost, _ in plans) > budget
        return
    assert is_possible(table, choice)
    cost, loss = table.totals(choice)
    assert cost <= budget + 1e-9
    best = min(loss for cost, loss in plans if cost <= budget)
    assert best <= loss <= best + largest_step(table)[1] + 1e-9


@given(tables(most_units=7, most_options=5), st.lists(st.floats(0, 260), min_size=2, max_size=8))
def test_more_budget_is_never_worse(table: ChoiceTable, budgets: list[float]) -> None:
    ordered = sorted(budgets)
    costs = [table.totals(least_cost(table, budget))[0] for budget in ordered]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(costs))
    found = [choice for choice in (least_loss(table, budget) for budget in ordered) if choice is not None]
    losses = [table.totals(choice)[1] for choice in found]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(losses))


def test_room_left_over_is_not_spent_on_a_worse_plan() -> None:
    """A greedy fill by the largest gain took unit 0 at a budget of 10, and units 1 and 2 at 9.9."""
    costs = np.array([[10.0, 0.0], [4.5, 0.0], [4.5, 0.0], [10.5, 0.0]])
    losses = np.array([[0.0, 5.0], [0.0, 4.0], [0.0, 4.0], [0.0, 10.0]])
    table = ChoiceTable(costs, losses)
    small, large = least_loss(table, 9.9), least_loss(table, 10.0)
    assert small is not None and large is not None
    assert table.totals(large)[1] <= table.totals(small)[1] == 15.0


@given(tables(most_units=6), st.floats(0, 200))
def test_equal_tables_give_equal_plans(table: ChoiceTable, budget: float) -> None:
    again = ChoiceTable(table.costs.copy(), table.losses.copy())
    assert np.array_equal(least_cost(table, budget), least_cost(again, budget))
    first, second = least_loss(table, budget), least_loss(again, budget)
    assert (first is None) == (second is None)
    assert first is None or np.array_equal(first, second)  # type: ignore[arg-type]


def test_options_off_the_hull_are_never_chosen() -> None:
    """Option 1 costs nearly as much as option 0, and loses nearly as much as option 2."""
    table = ChoiceTable(np.array([[10.0, 9.0, 0.0]]), np.array([[0.0, 9.0, 10.0]]))
    chosen = {int(least_cost(table, budget)[0]) for budget in (0.0, 5.0, 9.0, 9.5, 10.0)}
    assert chosen == {0, 2}


@pytest.mark.parametrize("budget", [0.0, float("inf")])
def test_the_ends_are_the_most_precise_and_the_cheapest_plan(budget: float) -> None:
    random = np.random.default_rng(0)
    table = ChoiceTable(random.uniform(1, 9, (50, 6)), random.uniform(0.1, 9, (50, 6)))
    cost, loss = table.totals(least_cost(table, budget))
    if budget:
        assert cost == pytest.approx(table.costs.min(axis=1).sum())
    else:
        assert loss == pytest.approx(table.losses.min(axis=1).sum())


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
