"""Searches that begin where that of another device ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moec.compiler.request.options import Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import ByteWeights, Target
from moec.compiler.search.bisect import search
from moec.compiler.search.boundary import Boundaries, Boundary, corrected_space
from moec.compiler.search.loss_search import CLOSE_KL, FROM_BOUNDARY
from moec.compiler.search.space import SearchSpace
from moec.compiler.search.swaps import Swaps
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from tests.compiler.search.toy_search import ToyTrials, noisy_kl, predicted_loss, totals, toy_space

SPACE = toy_space()
WEIGHTS = ByteWeights(np.random.default_rng(3).uniform(0.1, 2.0, (2, 4)), 1.0)
OTHER = toy_space(weights=WEIGHTS)
LOSS = Target("loss", 0.03)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "out.work", "inputs", Disk())


@pytest.fixture
def boundaries(journal: Journal) -> Boundaries:
    return Boundaries(journal, is_first=False)


def toy_trials(seed: int = 0) -> ToyTrials:
    """One model for both devices: the KL depends on the plan alone."""
    return ToyTrials(noisy_kl(toy_space(seed=seed)), slope=0.5)


def run(space: SearchSpace, trials: ToyTrials, boundaries: Boundaries | None, target: Target = LOSS) -> CompilePlan:
    return search(space, trials.as_trials(), target, lambda _: None, Swaps(24, Talk()), boundaries)


@pytest.mark.parametrize("seed", range(6))
def test_a_later_search_takes_a_few_measurements_and_as_few_bytes(seed: int, boundaries: Boundaries) -> None:
    space, other = toy_space(seed=seed), toy_space(seed=seed, weights=WEIGHTS)
    run(space, toy_trials(seed), boundaries)
    alone, later = toy_trials(seed), toy_trials(seed)
    by_itself = run(other, alone, None)
    plan = run(other, later, boundaries)
    assert later.accepts(plan, LOSS.value, "again")[0]
    assert len(later.generated) - 1 <= FROM_BOUNDARY
    assert len(later.measured) < len(alone.measured) / 2
    assert totals(other, plan)[0] <= 1.06 * totals(other, by_itself)[0]


def test_a_kl_target_needs_no_swaps_again(boundaries: Boundaries) -> None:
    target = Target("kl", 0.05)
    run(SPACE, toy_trials(), boundaries, target)
    alone, later = toy_trials(), toy_trials()
    run(OTHER, alone, None, target)
    plan = run(OTHER, later, boundaries, target)
    assert later.kl(plan, "again").mean <= target.value
    assert len(later.measured) < len(alone.measured) / 2


@pytest.mark.parametrize("target", [LOSS, Target("kl", 0.05)], ids=str)
def test_a_search_that_runs_again_finds_the_same_plan(boundaries: Boundaries, target: Target) -> None:
    """A resumed compile meets its own end and those of later devices. They change nothing."""
    first, second = (run(space, toy_trials(), boundaries, target) for space in (SPACE, OTHER))
    assert run(SPACE, toy_trials(), boundaries, target) == first == run(SPACE, toy_trials(), None, target)
    assert run(OTHER, toy_trials(), boundaries, target) == second


def test_another_target_is_searched_alone(boundaries: Boundaries) -> None:
    run(SPACE, toy_trials(), boundaries)
    target = Target("loss", 0.08)
    assert run(OTHER, toy_trials(), boundaries, target) == run(OTHER, toy_trials(), None, target)


def test_without_a_kept_plan_the_search_is_made_alone(boundaries: Boundaries) -> None:
    run(SPACE, toy_trials(), boundaries)
    stricter = ToyTrials(noisy_kl(SPACE), slope=2000.0)
    plan = run(OTHER, stricter, boundaries)
    assert plan not in stricter.generated[:FROM_BOUNDARY] and plan in stricter.generated[FROM_BOUNDARY:]
    assert stricter.accepts(plan, LOSS.value, "again")[0]


def test_a_resumed_search_measures_the_same_plans(boundaries: Boundaries) -> None:
    """They stand in quality.json, and their number decides which comparisons are affordable."""
    for space in (SPACE, OTHER):
        first, again = toy_trials(), toy_trials()
        run(space, first, boundaries)
        run(space, again, boundaries)
        assert (first.measured, first.generated) == (again.measured, again.generated)


def test_the_first_device_begins_alone_whatever_the_journal_holds(journal: Journal) -> None:
    run(OTHER, toy_trials(), Boundaries(journal, is_first=True))
    assert run(SPACE, toy_trials(), Boundaries(journal, is_first=True)) == run(SPACE, toy_trials(), None)


def test_a_damaged_end_is_no_knowledge(journal: Journal, boundaries: Boundaries, tmp_path: Path) -> None:
    run(SPACE, toy_trials(), boundaries)
    (file,) = (tmp_path / "out.work").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert run(OTHER, toy_trials(), boundaries) == run(OTHER, toy_trials(), None)


def test_the_first_plan_has_about_the_kl_of_the_earlier_one(boundaries: Boundaries) -> None:
    kept = toy_trials()
    kl = kept.kl(run(SPACE, kept, boundaries), "again").mean
    later = toy_trials()
    run(OTHER, later, boundaries)
    assert later.kl(later.generated[0], "again").mean == pytest.approx(kl, rel=CLOSE_KL**2 - 1)


def test_losses_measured_for_an_earlier_device_count(boundaries: Boundaries) -> None:
    """One plan that answers is enough, for the earlier search knows which KL uses the target up."""
    first, later = toy_trials(), toy_trials()
    run(SPACE, first, boundaries)
    run(OTHER, later, boundaries)
    answered = [{plan.digest for plan in trials.generated} for trials in (first, later)]
    assert len(answered[0]) > 1 == len(answered[1])


def test_corrections_of_the_earlier_search_are_taken_where_they_help() -> None:
    """Every other unit costs four times the KL that was predicted. The corrections know it."""
    factors = np.where(np.arange(SPACE.num_factors) % 2, 4.0, 1.0)
    true = SPACE.rescaled(factors)
    trials = ToyTrials(lambda plan: predicted_loss(true, plan))
    kl = 0.05
    for known, expected in ((factors, True), (1 / factors, False)):
        boundary = Boundary(kl, kl, (), known)
        assert (corrected_space(SPACE, trials.as_trials(), boundary) is not SPACE) == expected
