"""Answers that workers measure: equal bits for every division of the texts and every worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.cluster.ray_pool import Pool
from moec.compiler.cluster.remote import RemoteAnswers
from moec.compiler.families import Lowering
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.sensitivity.answer_walk import AnswerMeasures, AnswerWalk
from moec.compiler.sensitivity.trials import Trials
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.texts import TokenTexts, length_batches, text_batches
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import in_parts
from moec.evaluation.engine import no_progress
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.cluster.pool_here import (
    FAMILIES,
    SPECS,
    WORKERS,
    PoolHere,
    save_family,
    scored,
)
from tests.compiler.configured import lowered


def is_equal(one: AnswerMeasures, other: AnswerMeasures) -> bool:
    """Return whether two measurements have equal bits."""
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("kl", "agrees", "nll"))


def mixed(
    plain: CompilePlan, units: dict[UnitKey, QuantSpec], dense: dict[str, QuantSpec] | None = None
) -> CompilePlan:
    return replace(plain, units={**plain.units, **units}, dense={**plain.dense, **(dense or {})})


def some_plans(lowering: Lowering) -> list[CompilePlan]:
    """Return four plans. Below 16 bits are all weights, half of the units, the dense weights, and none."""
    plain, shapes = plain_plan(lowering.model, lowering.spec_16bit, "rtn"), lowering.model.dense_shapes()
    units = list(plain.units)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and QuantSpec(4, 32).fits(shape[1])]
    dense = dict.fromkeys([name for name in matrices if not name.endswith("router")], QuantSpec(4, 32))
    plans = [mixed(plain, dict.fromkeys(units, SPECS[0]), dense), mixed(plain, dict.fromkeys(units[::2], SPECS[1]))]
    return [*plans, mixed(plain, {}, dense), plain]


@pytest.fixture(scope="module")
def told(lowering: Lowering) -> list[list[AnswerMeasures]]:
    """Return the measures by one machine of 400 answers, and of the first 37, under each plan."""
    answers, store = scored(lowering.model, 400), UnitStore(lowering, "rtn")
    walk = AnswerWalk(lambda: LoadedLayer(lowering, 2), answers, 1, no_progress)
    plans = [(plan, store) for plan in some_plans(lowering)]
    return [list(walk.measure_each(plans, items)) for items in (None, 37)]


@WORKERS
def test_answers_are_measured_to_the_last_bit(
    folder: Path, lowering: Lowering, told: list[list[AnswerMeasures]], count: int, threads: int
) -> None:
    pool, store = PoolHere(folder, count, threads), UnitStore(lowering, "rtn")
    remote = RemoteAnswers(pool, scored(lowering.model, 400))
    for items, expected in zip((None, 37), told, strict=True):
        found = list(remote.measure_each([(plan, store) for plan in some_plans(lowering)], items))
        assert len(found) == len(expected)
        assert all(is_equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len(pool.jobs) > 2 * len(told[0]), "the answers were divided"
    assert len({float(measured.kl.mean()) for measured in told[0]}) == 4 and not told[0][-1].kl.any()
    assert sum(remote.answers.counts[:37]) == len(told[1][0].nll) < len(told[0][0].nll)


def test_what_was_tested_spans_batches(lowering: Lowering) -> None:
    """Otherwise the test above would pass with any division."""
    answers = scored(lowering.model, 400)
    assert len(text_batches(answers.texts)) > 4 and len(text_batches(answers.first(37).texts)) > 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 120), st.integers(1, 5))
def test_a_run_of_batches_is_cut_into_the_same_batches(lengths: list[int], tokens: int, per_job: int) -> None:
    texts = TokenTexts([[7] * length for length in lengths])
    batches = text_batches(texts, tokens)
    assert batches == length_batches(lengths, tokens)
    for run in in_parts(batches, per_job):
        indices = [index for batch in run for index in batch]
        again = text_batches(TokenTexts([texts.rows[index] for index in indices]), tokens)
        assert [[indices[at] for at in batch] for batch in again] == run


@pytest.mark.parametrize("name", [*FAMILIES, "switch", "switch-capacity"])
def test_what_a_plan_exchanged_is_put_back_in_every_family(name: str, tmp_path: Path) -> None:
    """One worker measures plan after plan with the bits of a machine that measures nothing else."""
    folder = save_family(tmp_path / "tiny", name)
    lowering = lowered(folder)
    answers, store = scored(lowering.model, 12), UnitStore(lowering, "rtn")
    remote, plans = RemoteAnswers(PoolHere(folder, 1, 1), answers), some_plans(lowering)
    found = list(remote.measure_each([(plan, store) for plan in plans]))
    for plan, measured in zip(plans, found, strict=True):
        walk = AnswerWalk(lambda: LoadedLayer(lowering), answers, 1, no_progress)
        assert all(is_equal(alone, measured) for alone in walk.measure_each([(plan, store)]))
    assert found[0].kl.mean() > 0.0001 and not found[-1].kl.any()


def trials_of(folder: Path, lowering: Lowering, work: Path, pool: Pool | None) -> Trials:
    answers, store = scored(lowering.model, 60), UnitStore(lowering, "rtn")
    walk = (
        AnswerWalk(lambda: LoadedLayer(lowering), answers, 1, no_progress)
        if pool is None
        else RemoteAnswers(pool, answers)
    )
    journal = Journal(work, "same", Disk())
    return Trials(walk, cast(Any, None), store, (), no_progress, journal, journal)


@WORKERS
def test_trials_measure_the_same(folder: Path, lowering: Lowering, tmp_path: Path, count: int, threads: int) -> None:
    found = []
    for name, pool in (("here", None), ("there", PoolHere(folder, count, threads))):
        trials, plans = trials_of(folder, lowering, tmp_path / name, pool), some_plans(lowering)
        first = trials.kl(plans[1], "alone")
        each = trials.kl_each([*plans, plans[0]], [str(at) for at in range(len(plans) + 1)])
        losses = trials.answer_nll_each(plans, trials.store, 4, no_progress)
        assert each[1] == first and each[-1] == each[0]
        found.append((each, losses, [trial.to_json() for trial in trials.log], trials.measured_items))
    assert found[0] == found[1]
    assert len({summary.mean for summary in found[0][0]}) == len(set(found[0][1])) == 4, "the plans differ"


def test_what_the_journal_has_is_not_measured_again(folder: Path, lowering: Lowering, tmp_path: Path) -> None:
    pool = PoolHere(folder, 2, 1)
    for expected in (True, False):
        trials = trials_of(folder, lowering, tmp_path / "work", pool)
        pool.jobs.clear()
        trials.kl_each(some_plans(lowering), "abcd")
        assert bool(pool.jobs) == expected


def test_a_weight_is_sent_once_for_all_plans(folder: Path, lowering: Lowering) -> None:
    """The texts are sent once, too. The weights of another store are sent again."""
    pool, plans, store = PoolHere(folder, 2, 1), some_plans(lowering)[:1], UnitStore(lowering, "rtn")
    remote, sent = RemoteAnswers(pool, scored(lowering.model, 20)), list[int]()
    for own in (store, store, UnitStore(lowering, "rtn")):
        before = pool.put(None)
        list(remote.measure_each([(plan, own) for plan in plans]))
        sent.append(pool.put(None) - before - 1)
    weights = sum(spec.bitwidth < 16 for spec in (*plans[0].units.values(), *plans[0].dense.values()))
    texts = sent[0] - weights - 1
    assert texts > 0 and sent == [texts + weights + 1, 1, weights + 1], "beside weights and texts, the list of handles"
