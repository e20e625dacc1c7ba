"""Swaps at equal bytes find by measurement what predictions miss. They never raise bytes or KL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moec.compiler.request.options import Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target
from moec.compiler.search.bisect import search
from moec.compiler.search.knapsack import least_loss
from moec.compiler.search.pruning import PrunableSpace, with_pruning
from moec.compiler.search.space import SearchSpace
from moec.compiler.search.swaps import PATIENCE, Swaps
from tests.compiler.search.test_pruning import EVEN
from tests.compiler.search.toy_search import ToyTrials, noisy_kl, predicted_loss, toy_model, toy_space, uniform_number

SPACE = toy_space(toy_model(layers=4, experts=8))
COST = 0.2 * SPACE.plain.expert_packed_bytes


def unforeseen(space: SearchSpace) -> Callable[[CompilePlan], float]:
    """Return a KL in which every unit has 0.2 to 5 times its predicted weight."""
    factors = np.array([5 ** (2 * uniform_number(f"true {row}") - 1) for row in range(len(space.table.losses))])
    actual = space.rescaled(factors)
    return lambda plan: predicted_loss(actual, plan)


def plan_at(space: SearchSpace) -> CompilePlan:
    choice = least_loss(space.size_table(), COST)
    assert choice is not None
    return space.plan(choice)


def test_swaps_lower_the_kl_at_equal_bytes() -> None:
    trials = ToyTrials(unforeseen(SPACE))
    best, gain, _ = Swaps(200, Talk()).corrected(SPACE, trials.as_trials(), plan_at)
    before, after = plan_at(SPACE), plan_at(best)
    assert after.expert_packed_bytes <= COST
    assert gain == unforeseen(SPACE)(after) / unforeseen(SPACE)(before) < 0.98
    assert unforeseen(SPACE)(after) == min(map(unforeseen(SPACE), trials.measured))


def test_swaps_end_when_nothing_is_gained_and_leave_the_space() -> None:
    trials, told, seen = ToyTrials(lambda plan: 1.0), list[str](), list[tuple[int, int]]()
    talk = Talk(told.append, lambda title: lambda done, total: seen.append((done, total)))
    assert Swaps(500, talk).corrected(SPACE, trials.as_trials(), plan_at)[:2] == (SPACE, 1.0)
    assert len(trials.measured) == 1 + PATIENCE
    assert seen[-1] == (500, 500), "a bar that ends early is full"
    bits = f"{plan_at(SPACE).bits_per_weight:.3f}"
    (line,) = told
    assert line.startswith(f"swaps at equal bytes, tried in a plan of {bits} bits per weight: KL 1.00000 before, ")
    assert line.endswith(f"1.00000 after {PATIENCE}")


def test_none_are_measured_where_none_are_asked_for() -> None:
    trials = ToyTrials(unforeseen(SPACE))
    assert Swaps(0, Talk()).corrected(SPACE, trials.as_trials(), plan_at)[:2] == (SPACE, 1.0)
    assert not trials.measured


@pytest.mark.parametrize(
    "target", [Target("kl", 0.05), Target("loss", 0.05), Target("size", COST), Target("bits_per_weight", 3.0)], ids=str
)
def test_a_search_with_swaps_keeps_its_target_at_no_more_bytes_or_less_kl(target: Target) -> None:
    def found(measurements: int) -> CompilePlan:
        swaps = Swaps(measurements, Talk())
        trials = ToyTrials(unforeseen(SPACE)).as_trials()
        return search(SPACE, trials, target, lambda sentence: None, swaps)

    alone, swapped = found(0), found(100)
    kl = unforeseen(SPACE)
    if target.kind in ("size", "bits_per_weight"):
        assert kl(swapped) < kl(alone)
        assert swapped.expert_packed_bytes <= 1.001 * max(alone.expert_packed_bytes, COST)
    else:
        sizes = [plan.expert_packed_bytes + plan.dense_packed_bytes for plan in (alone, swapped)]
        # The bisection of losses is coarse, so a plan may be cheaper by chance. That of a KL is within 1 %.
        assert sizes[1] <= (1.01 if target.kind == "loss" else 1.0) * sizes[0]
        assert kl(swapped) <= target.value


@pytest.mark.parametrize("target", [0.03, 0.05, 0.08])
@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_kept_plan_is_taken_and_swaps_do_not_make_it_dearer(seed: int, target: float) -> None:
    space = toy_space(toy_model(layers=4, experts=8), seed=seed)

    def searched(measurements: int) -> tuple[CompilePlan, list[CompilePlan]]:
        trials, told = ToyTrials(unforeseen(space)), list[str]()
        plan = search(space, trials.as_trials(), Target("loss", target), told.append, Swaps(measurements, Talk()))
        verdicts = [text.rsplit(" ", 1)[1] for text in told if "bits per weight: loss" in text]
        return plan, [each for each, verdict in zip(trials.generated, verdicts, strict=True) if verdict == "kept"]

    def cost(plan: CompilePlan) -> int:
        return plan.expert_packed_bytes + plan.dense_packed_bytes

    plan, kept = searched(80)
    assert cost(plan) == min(map(cost, kept))
    assert cost(plan) <= 1.02 * cost(searched(0)[0])


def test_the_same_swaps_every_time() -> None:
    digests = {
        search(
            SPACE, ToyTrials(noisy_kl(SPACE)).as_trials(), Target("loss", 0.03), lambda sentence: None, Swaps(9, Talk())
        ).digest
        for _ in range(2)
    }
    assert len(digests) == 1


def test_experts_that_may_be_left_out_have_a_factor_of_their_own() -> None:
    alone = toy_space()
    keys = alone.plain.model.expert_keys()
    space = with_pruning(alone, {keys[0]: 0.5, keys[1]: 2.0}, EVEN)
    factors = np.ones(space.num_factors)
    factors[-2:] = 3.0, 0.25
    changed = space.rescaled(factors)
    assert isinstance(changed, PrunableSpace)
    assert changed.left_out == {keys[0]: 1.5, keys[1]: 0.5}
    assert np.array_equal(changed.table.costs, space.table.costs)
    assert np.array_equal(changed.units_alone.table.losses, alone.table.losses)
