"""Search spaces in which matrices share a format, or have a part of the formats: what `bench.search.gain` compares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.search.gain import GROUPINGS, MATRIX
from bench.search.grouped_space import grouped, with_formats
from bench.search.measured_model import plan_of_size
from moec.compiler.request.plan import CompilePlan
from moec.compiler.search.space import SearchSpace
from tests.compiler.search.toy_search import predicted_loss, toy_space

BITS = (2.6, 3.5, 5.0)


def plan_of(space: SearchSpace, bits: float) -> CompilePlan:
    plan = plan_of_size(space, bits * space.plain.expert_weights / 8)
    assert plan is not None
    assert plan.bits_per_weight <= bits
    return plan


@pytest.mark.parametrize(("kind", "bits"), list(itertools.product(GROUPINGS, BITS)))
def test_a_group_has_one_format(kind: str, bits: float) -> None:
    space, group_of = toy_space(), GROUPINGS[kind]
    formats: dict[object, set[str]] = {}
    for unit, spec in plan_of(grouped(space, group_of), bits).units.items():
        formats.setdefault(group_of(unit), set()).add(str(spec))
    assert {len(found) for found in formats.values()} == {1}


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_one_matrix_change_no_plan(bits: float) -> None:
    space = toy_space()
    assert plan_of(grouped(space, GROUPINGS[MATRIX]), bits).units == plan_of(space, bits).units


@pytest.mark.parametrize("bits", BITS)
def test_finer_groups_lose_less(bits: float) -> None:
    space = toy_space()
    losses = [predicted_loss(space, plan_of(grouped(space, GROUPINGS[kind]), bits)) for kind in ("all experts", MATRIX)]
    assert losses[1] < losses[0]


def test_corrected_predictions_reach_the_groups() -> None:
    space = toy_space()
    factors = np.linspace(1, 2, space.num_factors)
    groups = grouped(space, GROUPINGS["each layer"])
    assert groups.num_factors == space.num_factors
    expected = grouped(space.rescaled(factors), GROUPINGS["each layer"])
    assert np.array_equal(groups.rescaled(factors).table.losses, expected.table.losses)


@pytest.mark.parametrize("bits", BITS)
def test_formats_that_are_not_offered_are_in_no_plan(bits: float) -> None:
    space = toy_space()
    part = with_formats(space, lambda column: space.unit_specs[column].bitwidth in (2, 4, 16))
    assert {spec.bitwidth for spec in plan_of(part, bits).units.values()} <= {2, 4, 16}
    assert 3 in {spec.bitwidth for spec in plan_of(space, 3.5).units.values()}
