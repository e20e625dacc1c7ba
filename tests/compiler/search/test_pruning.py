"""Experts that the search leaves out: rows of the knapsack, experts that may be left out, and whole compiles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.bundle.emit import cost_summary
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.targets import ByteWeights, Target
from moec.compiler.search.knapsack import least_cost, least_loss
from moec.compiler.search.pruning import LEAST_TOKENS, LEFT_OUT, kl_by_part, left_out_losses, prunes, with_pruning
from moec.compiler.sensitivity.sensitivity import SensitivityTable
from moec.manifests.errors import OptionError
from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, predicted_loss, toy_model, toy_space

LOSS = Target("loss", 0.02)
EVEN = ByteWeights(np.ones((2, 4)), 1.0)


def test_rows_of_experts_offer_what_rows_of_units_do() -> None:
    space = toy_space()
    whole = with_pruning(space, {}, EVEN)
    for budget in (0.0, 0.01, 0.1, 0.5, np.inf):
        plan, alone = whole.plan(least_cost(whole.table, budget)), space.plan(least_cost(space.table, budget))
        assert predicted_loss(space, plan) <= budget and (plan == alone or 0 < budget < np.inf)
        assert plan.expert_packed_bytes == pytest.approx(alone.expert_packed_bytes, rel=0.03), "up to a step of one row"
    for bits in (3.0, 4.0, 6.5):
        budget = bits * space.plain.expert_weights / 8
        choices = least_loss(space.size_table(), budget), least_loss(whole.size_table(), budget)
        assert choices[0] is not None and choices[1] is not None
        assert space.plan(choices[0]) == whole.plan(choices[1])


def test_an_expert_that_costs_nothing_to_leave_out_is_left_out() -> None:
    space = toy_space()
    key = ExpertKey(1, 2)
    pruned = with_pruning(space, {key: 0.0, ExpertKey(0, 0): 1e9}, EVEN)
    for budget in (0.0, 0.1):
        plan = pruned.plan(least_cost(pruned.table, budget))
        out = {unit for unit, spec in plan.units.items() if spec == LEFT_OUT}
        assert out == set(plan.model.units_of(key)), "all of it, and nothing else"
        assert pruned.table.totals(least_cost(pruned.table, budget))[1] <= budget
    assert list(plan.units) == list(space.plain.units)
    assert pruned.without_pruning() is space and space.without_pruning() is space


@given(st.lists(st.floats(0, 0.2), min_size=4, max_size=4), st.floats(0, 0.6))
def test_no_plan_with_more_options_is_dearer_by_more_than_a_step(losses: list[float], budget: float) -> None:
    """Compare with all choices of a model with one layer, four experts and two formats."""
    space = toy_space(toy_model(layers=1), specs=(QuantSpec(2, 64), BF16), dense_widths=(16,))
    pruned = with_pruning(space, {ExpertKey(0, e): loss for e, loss in enumerate(losses)}, EVEN)
    cost, loss = pruned.table.totals(least_cost(pruned.table, budget))
    assert loss <= budget + 1e-12
    rows = [np.flatnonzero(np.isfinite(row)).tolist() for row in pruned.table.costs]
    within = [
        found[0] for choice in itertools.product(*rows) if (found := pruned.table.totals(np.array(choice)))[1] <= budget
    ]
    steps = max(float(np.ptp(row[np.isfinite(row)])) for row in pruned.table.costs)
    assert cost <= min(within) + steps


def test_the_parts_of_a_plan_sum_to_what_the_search_predicts() -> None:
    space = toy_space()
    pruned = with_pruning(space, {ExpertKey(1, 2): 0.25}, EVEN)
    for budget in (0.05, 0.5, np.inf):
        choice = least_cost(pruned.table, budget)
        plan = pruned.plan(choice)
        parts = {row["part"]: row for row in kl_by_part(pruned, plan)}
        assert list(parts) == ["routed experts", "embedding", "attention", "lm_head", "norms and routers"]
        assert sum(row["kl"] for row in parts.values()) == pytest.approx(pruned.table.totals(choice)[1])
        assert sum(row["bytes"] for row in parts.values()) == plan.expert_packed_bytes + plan.dense_packed_bytes
        assert parts["routed experts"]["kl"] >= 0.25 * (LEFT_OUT in plan.units.values())
        assert parts["norms and routers"]["kl"] == 0 < parts["norms and routers"]["bytes"]


def test_reads_that_move_to_other_experts_are_not_saved() -> None:
    """If reads count, leaving out a popular expert saves only its size, because its tokens read another expert."""
    weights = np.full((2, 4), 0.5)
    weights[1, 2] = 3.0
    space = toy_space(weights=ByteWeights(weights, 1.0, 0.1))
    pruned = with_pruning(space, {ExpertKey(1, 2): 0.0, ExpertKey(0, 0): 0.0}, ByteWeights(weights, 1.0, 0.1))
    rows = dict(zip(space.plain.model.expert_keys(), pruned.table.costs, strict=False))
    for key, share in ((ExpertKey(1, 2), 0.1 / 3), (ExpertKey(0, 0), 0.1 / 0.5)):
        *kept, left_out_cost = rows[key][np.isfinite(rows[key])]
        assert left_out_cost == pytest.approx(min(kept) * (1 - share))
    plan = pruned.plan(least_cost(pruned.table, 0.0))
    units = {unit: spec if spec == LEFT_OUT else QuantSpec(4, 32) for unit, spec in plan.units.items()}
    plain = replace(plan, units=units)
    per_token = cost_summary(plain).expected_read_bytes_per_token
    kept_size = plain.expert_padded_bytes(ExpertKey(0, 1))
    assert per_token == 2 * 2 * kept_size, "two experts in each of two layers, for any pruning"


def test_who_too_few_tokens_asked_for_stays() -> None:
    space = toy_space()

    class Store:
        model = space.plain.model

        def error(self, unit: Any, spec: QuantSpec) -> float:
            assert unit.projection == "down" and spec == LEFT_OUT
            return 1.0 + unit.expert

        def holds(self, unit: Any, spec: QuantSpec) -> bool:
            return True

    table = SensitivityTable(np.full((2, 3), 0.5), {}, np.ones((2, 4)))
    popularity = np.full((2, 4), LEAST_TOKENS)
    popularity[1, 2] = 0
    found = left_out_losses(Store(), table, popularity)  # type: ignore[arg-type]
    assert found == {ExpertKey(0, 0): 0.5, ExpertKey(0, 1): 1.0, ExpertKey(1, 0): 0.5, ExpertKey(1, 1): 1.0}, "two stay"
    popularity[1, 1] = LEAST_TOKENS - 1
    assert ExpertKey(1, 3) in left_out_losses(Store(), table, popularity)  # type: ignore[arg-type]
    assert left_out_losses(Store(), table, None) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "given", "has_gradients", "expected"),
    [
        (LOSS, {}, True, True),
        (Target("kl", 0.01), {}, True, True),
        (Target("kl", 0.01), {}, False, False),
        (Target("kl", 0.01), {"prune": True}, False, True),
        (LOSS, {"prune": False}, True, False),
        (LOSS, {"search": "edgemoe"}, True, False),
        (Target("bits_per_weight", 3.0), {}, True, False),
        (Target("bits_per_weight", 3.0), {"prune": True}, True, True),
    ],
)
def test_experts_are_left_out_where_a_measured_target_decides(
    target: Target, given: dict[str, Any], has_gradients: bool, expected: bool
) -> None:
    assert prunes(CompileOptions(target, data="d", **given), toy_model(), has_gradients) is expected


def test_asked_for_where_it_cannot_be() -> None:
    options = CompileOptions(Target("kl", 0.01), data="d", prune=True)
    model = toy_model()
    needed = [replace(layer, experts=replace(layer.experts, top_k=layer.experts.count)) for layer in model.layers]
    with pytest.raises(OptionError, match="`--prune-experts`: the routers of this model need all of their experts"):
        prunes(options, replace(model, layers=tuple(needed)), has_gradients=True)
