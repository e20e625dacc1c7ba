"""The search with trials whose results are a known function of the plan, with noise."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest

from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target, TargetKind
from moec.compiler.search.bisect import MAX_KL, candidates, search
from moec.compiler.search.bracket import USED_UP, KlLimit, least_within
from moec.compiler.search.knapsack import least_cost
from moec.compiler.search.loss_search import KL_STEPS, MAX_GENERATED, mean_of
from moec.compiler.search.space import SearchSpace
from moec.manifests.errors import TargetUnreachable
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import ITEMS, SPECS, ToyTrials, noisy_kl, toy_model, toy_space

SPACE = toy_space()


def silent(sentence: str) -> None:
    """Ignore the message."""


def cost(space: SearchSpace, plan: CompilePlan) -> float:
    """Return the cost that the search minimises. The weights of a toy space are equal, so it is bytes."""
    return plan.expert_packed_bytes + plan.dense_packed_bytes


def best_cost(space: SearchSpace, trials: ToyTrials, target: Target) -> float:
    """Return the least cost of an accepted plan, over a fine sweep of budgets."""
    plans = [space.plan(least_cost(space.table, budget)) for budget in np.geomspace(1e-5, 3, 300)]
    if target.kind == "kl":
        kept = [plan for plan in plans if trials.kl(plan, "sweep").mean <= target.value]
    else:
        kept = [plan for plan in plans if trials.accepts(plan, target.value, "sweep")[0]]
    return min(cost(space, plan) for plan in kept)


@pytest.mark.parametrize("value", [0.002, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_kl_target_is_kept_and_used_up(value: float, seed: int) -> None:
    space, target = toy_space(seed=seed), Target("kl", value)
    trials = ToyTrials(noisy_kl(space))
    plan = search(space, trials.as_trials(), target, silent)
    assert plan in trials.measured
    assert trials.kl(plan, "again").mean <= value
    assert len(trials.measured) - 1 <= MAX_KL + 1
    assert not trials.generated, "a KL target needs no generated answers"
    assert cost(space, plan) <= 1.05 * best_cost(space, ToyTrials(noisy_kl(space)), target)


@pytest.mark.parametrize("slope", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("value", [0.02, 0.08])
def test_a_loss_target_is_kept_within_the_stated_measurements(value: float, slope: float) -> None:
    target = Target("loss", value)
    trials = ToyTrials(noisy_kl(SPACE), slope)
    plan = search(SPACE, trials.as_trials(), target, silent)
    assert len(trials.generated) <= MAX_GENERATED
    assert plan in trials.generated
    assert trials.accepts(plan, value, "again")[0]
    assert cost(SPACE, plan) <= 1.08 * best_cost(SPACE, ToyTrials(noisy_kl(SPACE), slope), target)


def test_a_quick_search_for_a_loss_measures_no_answers() -> None:
    trials, notes = ToyTrials(noisy_kl(SPACE), 0.5), list[str]()
    plans = candidates(SPACE, trials.as_trials(), Target("loss", 0.02), notes.append, is_quick=True)
    assert not trials.generated and len(plans) == 1 and trials.measured
    assert 0.5 * 0.02 <= trials.kl(plans[0], "again").mean <= 0.02, "the KL of a usual relation, here 1"
    assert notes[0] == "no answers choose the plan: a KL of 0.02 nats per token usually loses about 2.00%"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["loss", "kl"])
def test_a_target_that_everything_keeps_takes_the_smallest_plan_to_the_last_unit(kind: TargetKind, seed: int) -> None:
    """The sum of predicted losses and an equal budget may differ in the last bit."""
    space = toy_space(seed=seed)
    smallest = space.plan(least_cost(space.table, np.inf))
    plan = search(space, ToyTrials(lambda _: 1e-6).as_trials(), Target(kind, 0.5), silent)
    assert cost(space, plan) == cost(space, smallest)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("power", [0.5, 0.65, 0.8, 1.0, 1.3])
def test_few_measurements_reach_a_kl_whatever_the_power_of_its_prediction(power: float, seed: int) -> None:
    """On natural weights the KL rises with the power 0.65 of its prediction. Proportional steps then fall short."""
    space, value = toy_space(toy_model(layers=6, experts=16), seed=seed), 0.02
    trials = ToyTrials(noisy_kl(space, noise=0.01, power=power))
    found = least_within(space, trials.as_trials(), KlLimit(value, mean_of, KL_STEPS), value)
    assert found is not None
    assert len(trials.measured) <= 3
    assert value / USED_UP <= trials.kl(found.plan, "again").mean <= value
    assert found.exponent == pytest.approx(power, abs=0.1)


@pytest.mark.parametrize("power", [0.5, 0.65])
def test_a_power_that_is_known_saves_measurements(power: float) -> None:
    """One step then reaches half of a KL. The search keeps the power from one wanted KL to the next."""

    def measurements(exponent: float) -> int:
        space = toy_space(toy_model(layers=6, experts=16), seed=0)
        trials = ToyTrials(noisy_kl(space, noise=0.01, power=power)).as_trials()
        first = least_within(space, trials, KlLimit(0.02, mean_of, KL_STEPS), 0.02)
        assert first is not None
        again = ToyTrials(noisy_kl(space, noise=0.01, power=power))
        limit = KlLimit(0.01, mean_of, KL_STEPS)
        assert least_within(space, again.as_trials(), limit, first.predicted, exponent=exponent or first.exponent)
        return len(again.measured)

    assert measurements(0.0) == 2 < measurements(1.0)


@pytest.mark.parametrize("slope", [0.02, 0.04])
def test_without_swaps_the_search_goes_on_until_the_target_is_used_up(slope: float) -> None:
    """The first KL is far too small here, and each step raises it to at most four times."""
    trials = ToyTrials(noisy_kl(SPACE), slope=slope, standard_error=1e-4)
    plan = search(SPACE, trials.as_trials(), Target("loss", 0.02), silent)
    assert 0.018 < slope * trials.kl(plan, "again").mean <= 0.02


def test_a_search_begins_again_below_all_that_it_refused() -> None:
    trials = ToyTrials(noisy_kl(SPACE), slope=1000, standard_error=1e-4)
    plan = search(SPACE, trials.as_trials(), Target("loss", 0.02), silent)
    assert 0 < 1000 * trials.kl(plan, "again").mean <= 0.02, "the most precise plan has a KL of 0"
    assert len({tried.digest for tried in trials.generated}) == 5


@pytest.mark.parametrize(
    ("target", "measure", "limit"), [(Target("loss", 0.02), "loss toy", "2.00%"), (Target("kl", 0.02), "KL", "0.02")]
)
def test_every_measurement_is_told_with_the_bound_that_decides(target: Target, measure: str, limit: str) -> None:
    told: list[str] = []
    search(SPACE, ToyTrials(noisy_kl(SPACE)).as_trials(), target, told.append)
    verdicts = [text for text in told if f"bits per weight: {measure}" in text]
    assert verdicts and (target.kind == "kl" or verdicts == told)
    for text in verdicts:
        upper = float(re.split("[ %,]", text.split("upper bound ")[1])[0])
        assert text.endswith(f"<= {limit}: kept" if upper <= float(limit.rstrip("%")) else f"> {limit}: refused")


def test_a_refused_plan_is_told_with_the_bound_that_refuses_it_and_the_items_that_would_help() -> None:
    """40 items with a standard error of a quarter of the loss refuse plans whose loss alone is within the target."""
    told: list[str] = []
    trials = ToyTrials(noisy_kl(SPACE), standard_error=0.008)
    with suppress(TargetUnreachable):
        search(SPACE, trials.as_trials(), Target("loss", 0.02), told.append)
    refused = [text for text in told if text.endswith("refused")]
    assert any(float(text.split("loss toy ")[1].split("%")[0]) <= 2 for text in refused)
    advice = [text for text in told if "would make it a quarter of the target" in text]
    assert len(advice) == 1 and "standard error of 0.80%" in advice[0]
    assert f"on {ITEMS} items, all that the data holds" in advice[0]


@pytest.mark.parametrize("available", [(ITEMS, ITEMS + 1), (ITEMS - 30, ITEMS)])
def test_more_items_are_advised_only_where_the_data_holds_no_more(available: tuple[int, int]) -> None:
    """Items of the train split that join those of validation are told once."""
    told: list[str] = []
    trials = ToyTrials(noisy_kl(SPACE), standard_error=0.008)
    trials.available_items = {"toy": available}  # type: ignore[misc]
    with suppress(TargetUnreachable):
        search(SPACE, trials.as_trials(), Target("loss", 0.02), told.append)
    is_all = available[1] == ITEMS
    assert any("would make it a quarter of the target" in text for text in told) == is_all
    sentence = f"30 train texts that neither calibration nor gradients use join the {ITEMS - 30}"
    joined = [text for text in told if sentence in text]
    assert len(joined) == is_all


def test_a_plan_is_told_once() -> None:
    """Each step of the search leads to the one plan on offer."""
    told: list[str] = []
    with pytest.raises(TargetUnreachable):
        space = toy_space(specs=SPECS[:1], dense_widths=(8,))
        search(space, ToyTrials(noisy_kl(space)).as_trials(), Target("kl", 0.01), told.append)
    assert len(told) == 1


@pytest.mark.parametrize("target", [Target("kl", 1e-3), Target("loss", 1e-3)])
def test_an_unreachable_target_names_what_can_be_had(target: Target) -> None:
    """With only 2 bits on offer there is one plan, and it is far from the target."""
    space = toy_space(specs=SPECS[:1], dense_widths=(8,))
    trials = ToyTrials(noisy_kl(space), standard_error=1e-4)
    with pytest.raises(TargetUnreachable) as caught:
        search(space, trials.as_trials(), target, silent)
    only = space.plan(least_cost(space.table, 0.0))
    reached = trials.kl(only, "again").mean
    expected = f"has KL {reached:.4g}" if target.kind == "kl" else f"measures loss toy {reached:.2%}"
    assert expected in caught.value.message
    assert f"{only.bits_per_weight:.2f} bits per weight" in caught.value.message
    assert "--bits" in str(caught.value.hint)
    assert len(trials.generated) <= MAX_GENERATED + 1


def test_the_most_precise_plan_is_tried_before_giving_up() -> None:
    """Only plans with all weights at 16 bits are accepted here, so every step of the search is refused."""

    def kl_of(plan: CompilePlan) -> float:
        widths = {spec.bitwidth for spec in (*plan.units.values(), *plan.dense.values())}
        return 0.0 if widths == {16} else 5.0

    for target in (Target("kl", 0.01), Target("loss", 0.01)):
        trials = ToyTrials(kl_of)
        plan = search(SPACE, trials.as_trials(), target, silent)
        assert kl_of(plan) == 0.0
        assert len(trials.generated) <= MAX_GENERATED + 1


@pytest.mark.parametrize("share", [0.16, 0.2, 0.31, 0.6, 1.0])
def test_a_size_target_is_met_in_packed_bytes_and_filled(share: float) -> None:
    budget = int(share * SPACE.plain.expert_packed_bytes)
    plan = search(SPACE, ToyTrials(noisy_kl(SPACE)).as_trials(), Target("size", budget), silent)
    largest_step = max(
        rows * columns * 2 for rows, columns in (SPACE.plain.model.unit_shape(0, p) for p in ("gate", "down"))
    )
    assert budget - largest_step < plan.expert_packed_bytes <= budget
    assert {plan.dense[name].bitwidth for group in SPACE.groups for name in group.tensors} == {16}


@pytest.mark.parametrize("bits", [2.5, 3.25, 4.1, 7.0, 16.0])
def test_bits_per_weight_count_scales(bits: float) -> None:
    plan = search(SPACE, ToyTrials(noisy_kl(SPACE)).as_trials(), Target("bits_per_weight", bits), silent)
    assert bits - 0.5 < plan.bits_per_weight <= bits
    assert plan.expert_packed_bytes * 8 <= bits * plan.expert_weights


def test_a_size_target_without_data_measures_nothing() -> None:
    trials = ToyTrials(noisy_kl(SPACE))
    trials.has_data = False
    search(SPACE, trials.as_trials(), Target("bits_per_weight", 4.0), silent)
    assert not trials.measured and not trials.generated


def test_a_size_below_the_smallest_plan() -> None:
    space = toy_space(specs=(QuantSpec(2, 64),))
    smallest = space.plan([0] * len(space.table.costs)).expert_packed_bytes
    with pytest.raises(TargetUnreachable, match=f"{smallest} bytes") as caught:
        search(SPACE, ToyTrials(noisy_kl(SPACE)).as_trials(), Target("size", smallest - 1), silent)
    assert "--bits" in str(caught.value.hint)
    plan = search(SPACE, ToyTrials(noisy_kl(SPACE)).as_trials(), Target("size", smallest), silent)
    assert plan.expert_packed_bytes == smallest
