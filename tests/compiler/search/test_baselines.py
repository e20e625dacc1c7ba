"""Best uniform format compared with brute force, EdgeMoE's list and count on lists made by hand, interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.request.uniform import uniform_like
from moec.compiler.search.baselines import (
    BaselineResult,
    TargetRule,
    best_uniform,
    bytes_at_kl,
    edgemoe,
    last_kept,
    weighed_by_use,
)
from moec.compiler.search.comparison import offered_to_edgemoe
from moec.compiler.sensitivity.exact import EXACT_ITEMS, LoweredPlans, importance_list, with_lowered_experts
from moec.manifests.model import PROJECTIONS, ExpertKey, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, SPECS, ToyStore, ToyTrials, toy_model, uniform_number

PLAIN = replace(
    plain_plan(toy_model(), BF16, "gptq"),
    dense={name: QuantSpec(8) if len(shape) == 2 else BF16 for name, shape in toy_model().dense_shapes().items()},
)
STORE = cast(UnitStore, ToyStore())
FORMATS: dict[float, QuantSpec] = {2: QuantSpec(2, 32), 4: QuantSpec(4, 32), 8: QuantSpec(8, 32), 16: BF16}


def only_spec(plan: CompilePlan) -> QuantSpec:
    (spec,) = set(plan.units.values())
    return spec


@given(st.lists(st.floats(0.001, 1), min_size=len(SPECS), max_size=len(SPECS), unique=True), st.floats(0, 1.1))
def test_best_uniform_is_what_trying_all_formats_finds(kls: list[float], limit: float) -> None:
    by_spec = dict(zip(SPECS, kls, strict=True))
    asked: list[CompilePlan] = []

    def keeps(plan: CompilePlan) -> bool:
        asked.append(plan)
        return by_spec[only_spec(plan)] <= limit

    trials = ToyTrials(lambda plan: by_spec[only_spec(plan)])
    found = best_uniform(PLAIN, SPECS, trials.as_trials(), TargetRule(keeps)).plan
    kept = [spec for spec in SPECS if by_spec[spec] <= limit]
    if not kept:
        assert found is None
    else:
        assert found is not None and found.dense == PLAIN.dense
        fewest = min(uniform_like(PLAIN, spec).expert_packed_bytes for spec in kept)
        assert found.expert_packed_bytes == fewest
    assert len(asked) <= math.ceil(math.log2(len(SPECS) + 1)), "generated answers are dear"


def test_best_uniform_passes_over_formats_that_do_not_fit() -> None:
    plain = plain_plan(toy_model(width=96), BF16, "gptq")
    trials = ToyTrials(lambda plan: 1 / only_spec(plan).bits_per_weight(64))
    result = best_uniform(plain, SPECS, trials.as_trials(), TargetRule(lambda plan: True))
    assert {only_spec(plan).group_size for plan in trials.measured} == {0, 32}
    assert result.plan is not None and str(only_spec(result.plan)) == "q2g32"


def test_best_uniform_of_a_size_is_the_best_that_is_not_larger() -> None:
    trials = ToyTrials(lambda plan: 4.0 ** -only_spec(plan).bitwidth)
    budget = uniform_like(PLAIN, QuantSpec(4, 32)).expert_packed_bytes
    small = TargetRule(lambda plan: plan.expert_packed_bytes <= budget, by_size=True)
    result = best_uniform(PLAIN, SPECS, trials.as_trials(), small)
    assert result.plan is not None and only_spec(result.plan).bitwidth == 4
    never = TargetRule(lambda plan: False, by_size=True)
    assert best_uniform(PLAIN, SPECS, trials.as_trials(), never).plan is None


@given(st.integers(0, 40), st.integers(0, 40))
def test_bisection_finds_the_last_that_is_kept(count: int, good: int) -> None:
    plans = [replace(PLAIN, quantizer=str(index)) for index in range(count)]
    asked: list[int] = []

    def keeps(plan: CompilePlan) -> bool:
        asked.append(int(plan.quantizer))
        return asked[-1] < good

    assert last_kept(plans, keeps) == min(good, count) - 1
    assert len(asked) <= math.ceil(math.log2(count + 1)) and len(set(asked)) == len(asked)


def lowered(result: BaselineResult, bits: int) -> set[ExpertKey]:
    """Return the experts whose three projections all have that bitwidth."""
    assert result.plan is not None
    experts = {}
    for unit, spec in result.plan.units.items():
        experts.setdefault(ExpertKey(unit.layer, unit.expert), set()).add(spec.bitwidth)
    assert all(len(widths) == 1 for widths in experts.values()), "EdgeMoE decides by whole experts"
    return {key for key, widths in experts.items() if widths == {bits}}


def share_below(plan: CompilePlan, bits: int) -> float:
    return sum(spec.bitwidth < bits for spec in plan.units.values()) / len(plan.units)


LOSSES = {key: uniform_number(f"importance {key}") for key in PLAIN.model.expert_keys()}
LEAST_IMPORTANT = sorted(LOSSES, key=lambda key: LOSSES[key])


@pytest.mark.parametrize("count", range(1, 8))
def test_edgemoe_lowers_the_least_important_experts(count: int) -> None:
    """4 bits keep the target, 2 bits do not. At most `count` experts at 2 bits keep it."""

    def keeps(plan: CompilePlan) -> bool:
        return share_below(plan, 4) <= count / 8

    trials = ToyTrials(lambda plan: 0.01 + share_below(plan, 4))
    result = edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, trials.as_trials(), STORE, TargetRule(keeps))
    assert lowered(result, 2) == set(LEAST_IMPORTANT[:count])
    assert lowered(result, 4) == set(LEAST_IMPORTANT[count:])
    assert result.plan is not None and result.plan.dense == PLAIN.dense
    assert len(result.frontier) == len(trials.measured)


def test_losses_are_weighed_by_use() -> None:
    """At equal losses the expert that saves most reads comes first, and one that saves none comes last."""
    keys = [ExpertKey(layer, expert) for layer in range(2) for expert in range(3)]
    popularity = np.array([[6, 3, 0], [1, 1, 0]], np.uint32)
    weighed = weighed_by_use(dict.fromkeys(keys, 0.5), popularity, [2, 1])
    assert weighed == {
        (0, 0): pytest.approx(0.5 / (2 * 6 / 9)), (0, 1): pytest.approx(0.5 / (2 * 3 / 9)), (0, 2): math.inf,
        (1, 0): 1.0, (1, 1): 1.0, (1, 2): math.inf,
    }  # fmt: skip
    gains = weighed_by_use(dict.fromkeys(keys, -0.5), popularity, [2, 1])
    assert sorted(gains, key=lambda key: (gains[key], key))[:2] == [(0, 0), (0, 1)] and gains[keys[2]] == 0


NUMBERS = st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 2**32 - 1)), min_size=8, max_size=8)


@given(NUMBERS)
def test_weighed_losses_keep_their_sign_and_order(drawn: list[tuple[float, int]]) -> None:
    """No number is NaN. Of two experts of a layer, one with less loss and more use comes first."""
    keys = PLAIN.model.expert_keys()
    losses = {key: loss for key, (loss, _) in zip(keys, drawn, strict=True)}
    counts = np.zeros((2, 4), np.uint32)
    for key, (_, count) in zip(keys, drawn, strict=True):
        counts[key] = count
    weighed = weighed_by_use(losses, counts, [2, 2])
    assert not any(math.isnan(value) for value in weighed.values())
    for one, other in permutations(keys, 2):
        if one.layer == other.layer and losses[one] <= losses[other] and counts[one] >= counts[other]:
            assert weighed[one] <= weighed[other]


def test_edgemoe_at_the_ends() -> None:
    trials = ToyTrials(lambda plan: 0.1).as_trials()
    assert edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, trials, STORE, TargetRule(lambda plan: False)).plan is None
    all_low = edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, trials, STORE, TargetRule(lambda plan: True))
    assert len(lowered(all_low, 2)) == 8
    none_below_8 = TargetRule(lambda plan: not share_below(plan, 8))
    no_count = edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, trials, STORE, none_below_8)
    assert len(lowered(no_count, 8)) == 8


@pytest.mark.parametrize("experts_at_2", [0, 1, 5, 8])
def test_edgemoe_for_a_size_lowers_no_more_than_it_must(experts_at_2: int) -> None:
    low, high = (uniform_like(PLAIN, FORMATS[bits]).expert_packed_bytes for bits in (2, 4))
    budget = high - experts_at_2 * (high - low) / 8

    def keeps(plan: CompilePlan) -> bool:
        return plan.expert_packed_bytes <= budget

    trials = ToyTrials(lambda plan: 0.1).as_trials()
    result = edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, trials, STORE, TargetRule(keeps, by_size=True))
    assert lowered(result, 2) == set(LEAST_IMPORTANT[:experts_at_2])
    never = TargetRule(lambda plan: False, by_size=True)
    nothing = edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, trials, STORE, never)
    assert nothing.plan is None


def test_the_importance_list_puts_one_expert_at_2_bits_and_the_others_at_4() -> None:
    seen: list[CompilePlan] = []

    class NllTrials(ToyTrials):
        def answer_nll_each(
            self, plans: Sequence[CompilePlan], store: object, items: int, progress: Progress
        ) -> list[float]:
            assert store is STORE and items == EXACT_ITEMS
            seen.extend(plans)
            progress(len(plans), len(plans))
            return [1.5 + self._increase(plan) for plan in plans]

        @staticmethod
        def _increase(plan: CompilePlan) -> float:
            low = [unit for unit, spec in plan.units.items() if spec.bitwidth == 2]
            return LOSSES[ExpertKey(low[0].layer, low[0].expert)] if low else 0.0

    progress: list[tuple[int, int]] = []
    trials = NllTrials(lambda plan: 0.0).as_trials()
    found = importance_list(PLAIN, FORMATS[2], FORMATS[4], trials, STORE, lambda *at: progress.append(at))
    assert found == pytest.approx(LOSSES)
    assert progress == [(9, 9)], "the experts, and the plan that they are compared with"
    assert only_spec(seen[0]) == FORMATS[4]
    for key, plan in zip(PLAIN.model.expert_keys(), seen[1:], strict=True):
        low = {unit for unit, spec in plan.units.items() if spec == FORMATS[2]}
        assert low == {UnitKey(*key, projection) for projection in PROJECTIONS}


def test_plans_with_lowered_experts_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them would not fit in memory."""
    made: list[int] = []

    def recorded(base: CompilePlan, keys: Sequence[ExpertKey], lower: QuantSpec) -> CompilePlan:
        made.append(len(keys))
        return with_lowered_experts(base, keys, lower)

    monkeypatch.setattr("moec.compiler.sensitivity.exact.with_lowered_experts", recorded)
    keys = PLAIN.model.expert_keys()
    base = uniform_like(PLAIN, FORMATS[4])
    plans = LoweredPlans(base, FORMATS[2], len(keys) + 1, lambda count: keys[:count])
    assert len(plans) == len(keys) + 1 and not made
    assert plans[0] == base and plans[-1] == plans[len(keys)] == uniform_like(PLAIN, FORMATS[2])
    assert made == [0, len(keys), len(keys)] and len(plans[1:3]) == 2
    with pytest.raises(IndexError):
        plans[len(keys) + 1]
    made.clear()
    half = TargetRule(lambda plan: sum(spec.bitwidth == 2 for spec in plan.units.values()) <= 3 * len(keys) // 2)
    edgemoe("EdgeMoE", PLAIN, FORMATS, LOSSES, ToyTrials(lambda plan: 0.0).as_trials(), STORE, half)
    assert 0 < len(made) <= len(keys).bit_length() + 1


@pytest.mark.parametrize(
    ("offered", "group", "found"),
    [
        ("q2g64 q2g32 q4g64 q4g32 q8g64", 32, "q2g32 q4g32 q8g64"),  # 8 bits are on offer in the widest group alone
        ("q2g64 q2g32 q3g64 q3g32 q4g64 q4g32 q8", 64, "q2g64 q4g64 q8"),
        ("q2g64 q4g64", 64, "q2g64 q4g64"),
        ("q3g64 q3g32", 32, "q3g32"),
        ("q2g64 q4g32 mxfp4", 32, "q2g64 mxfp4"),  # the checkpoint's own format is exact
        ("q4g128", 128, ""),  # its groups do not divide the columns
        ("", 0, ""),
    ],
)
def test_edgemoe_takes_formats_on_offer_alone(offered: str, group: int, found: str) -> None:
    """Units are quantized in no other format."""
    specs = [*map(QuantSpec.parse, offered.split()), BF16]
    formats = offered_to_edgemoe(plain_plan(toy_model(), BF16, "gptq"), specs, group)
    assert [str(spec) for _, spec in sorted(formats.items())] == found.split()
    assert all(spec.bitwidth == bitwidth for bitwidth, spec in formats.items())


@pytest.mark.parametrize(
    ("kl", "size"), [(0.01, 1500), (0.1, 1000), (0.001, 2000), (0.11, None), (0.0009, None), (0.0, None)]
)
def test_bytes_at_equal_kl_interpolate_in_log_kl_within_the_frontier(kl: float, size: float | None) -> None:
    assert bytes_at_kl([(1000, 0.1), (2000, 0.001)], kl) == (size and pytest.approx(size))


def test_the_frontier_is_its_lower_envelope() -> None:
    """A larger plan that is worse than a smaller one is left out. A plan without loss has no logarithm."""
    frontier = [(2000, 0.001), (1500, 0.5), (1000, 0.1), (9000, 0.0), (1000, 0.3)]
    assert bytes_at_kl(frontier, 0.01) == pytest.approx(1500)
    assert bytes_at_kl([(1000, 0.1)], 0.1) is None
    assert bytes_at_kl([], 0.1) is None
