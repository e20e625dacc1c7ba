"""Trials: the measurements, no traces of them, and early stops."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.bundle.plan_bundles import PlanBundles
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.sensitivity.acceptance import LEVELS, keeps, kl_bound, margin, upper_bound
from moec.compiler.sensitivity.answer_walk import AnswerMeasures, AnswerWalk, planned_weights
from moec.compiler.sensitivity.trials import LOOKS, TaskData, Trials
from moec.compiler.stages.compile_context import CompileContext
from moec.compiler.stages.encode_texts import encode_all_texts
from moec.compiler.stages.measure import task_data
from moec.compiler.walker import output_head
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.texts import AnswerTexts
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.data import ItemSet
from moec.evaluation.engine import Generation, GenerationRequest, Take, TextEngine, no_progress
from moec.evaluation.run import compare, evaluate
from moec.evaluation.statistics import divergence, log_softmax, summarise_divergence
from moec.evaluation.tasks import find_task
from moec.manifests.errors import OptionError
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, estimate, toy_model
from tests.tiny_compile import make_request, names, save_model, save_texts
from tests.transformers_oracle import TransformersOracle

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(kl: np.ndarray) -> AnswerMeasures:
    return AnswerMeasures(kl, np.ones(len(kl), bool), np.zeros(len(kl)))


def test_a_task_with_short_answers_is_not_hidden_by_one_with_long_ones() -> None:
    """Of two tasks each has a mean. The mean over all tokens hardly knows the first one."""
    draw = np.random.default_rng(3)
    counts = [10] * 128 + [100] * 128
    kl = np.concatenate([draw.gamma(2, 0.025, 1280), draw.gamma(2, 0.005, 12800)])
    found = measured(kl).summary(counts, [128, 128])
    assert found.mean == pytest.approx(kl.mean()) and found.mean < 0.02
    (short, short_error), (long, _) = found.by_task
    assert (short, long) == (pytest.approx(kl[:1280].mean()), pytest.approx(kl[1280:].mean()))
    assert kl_bound(found, [(128, 99)] * 2) == pytest.approx(short + margin(short_error, 128, 99)) and short > 0.045
    assert json.loads(json.dumps(found.to_json()))["by_task"] == [list(pair) for pair in found.by_task]


def test_one_task_has_no_further_means() -> None:
    found = measured(np.full(20, 0.01)).summary([10, 10], [2])
    assert found.by_task == () and "by_task" not in found.to_json()
    assert kl_bound(found, [(2, 9)]) == pytest.approx(0.01)


def test_a_task_with_one_text_counts_with_its_mean() -> None:
    found = measured(np.repeat([0.01, 0.05], [20, 10])).summary([10, 10, 10], [2, 1])
    assert found.by_task[1] == (pytest.approx(0.05), math.inf)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["by_task"][1] == [pytest.approx(0.05), None]
    assert kl_bound(found, [(2, 9), (1, 9)]) == pytest.approx(0.05)


def open_journal(folder: Path, identity: str = "one") -> Journal:
    """Return a journal in a folder, which is made if it is missing."""
    folder.mkdir(exist_ok=True)
    return Journal(folder / "model.work", identity, Disk())


@dataclass(frozen=True)
class Scene:
    """A checkpoint with texts, and two plans: all weights at 16 bits, and 2 bits with 4-bit attention."""

    prepared: Prepared
    texts: AnswerTexts
    store: UnitStore
    plain: CompilePlan
    coarse: CompilePlan

    def walk(self, progress: Progress = no_progress) -> AnswerWalk:
        return AnswerWalk(lambda: LoadedLayer(self.prepared.lowering), self.texts, 1, progress)

    def bundles(self, output: Path) -> PlanBundles:
        """Return what writes temporary bundles next to an output."""
        request = replace(self.prepared.request, output=output)
        journal = open_journal(output.parent)
        return CompileContext(replace(self.prepared, request=request), journal, journal, None).bundles

    def trials(self, folder: Path, identity: str = "one", walk: Any = None, bundles: Any = None) -> Trials:
        journal = open_journal(folder, identity)
        return Trials(
            walk or self.walk(), bundles or self.bundles(folder / "out"), self.store, task_data(self.prepared),
            no_progress, journal, journal,
        )  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("trials")
    data = save_texts(folder / "texts", train=4, validation=4, test=6)
    model = save_model(folder / "tiny", layers=2, experts=4)
    prepared = prepare(make_request(model, folder / "out", "loss", 0.02, data=str(data), tasks=("perplexity",)))
    plain = plain_plan(prepared.lowering.model, prepared.lowering.spec_16bit, "rtn")
    shapes = plain.model.dense_shapes()
    dense = {n: QuantSpec(4) if len(s) == 2 and not n.endswith("router") else BF16 for n, s in shapes.items()}
    coarse = replace(plain, units=dict.fromkeys(plain.units, QuantSpec(2, 32)), dense=dense)
    return Scene(prepared, encode_all_texts(prepared).validation, UnitStore(prepared.lowering, "rtn"), plain, coarse)


def finer(plan: CompilePlan) -> CompilePlan:
    """Return the plan with 3 bits for each expert."""
    return replace(plan, units=dict.fromkeys(plan.units, QuantSpec(3, 32)))


def test_the_plain_plan_has_no_divergence(scene: Scene, tmp_path: Path) -> None:
    trials = scene.trials(tmp_path)
    nothing, much = trials.kl(scene.plain, "plain"), trials.kl(scene.coarse, "coarse")
    assert (nothing.mean, nothing.max, nothing.agreement) == (0.0, 0.0, 1.0)
    assert much.mean > 0.01 and much.agreement < 1.0
    assert [trial.purpose for trial in trials.log] == ["plain", "coarse"]
    assert trials.log[1].expert_packed_bytes == scene.coarse.expert_packed_bytes
    assert trials.accepts(scene.plain, 0.02, "plain")[1]["perplexity"].loss == 0.0


def test_a_plan_is_measured_as_the_reference_model_computes_it(scene: Scene, tmp_path: Path) -> None:
    """KL and NLL of answers layer by layer, and the loss of a temporary bundle, equal those of the whole model."""
    trials, reference = scene.trials(tmp_path), TransformersOracle(scene.prepared.checkpoint.root)
    data, weight = trials.tasks[0], planned_weights(scene.coarse, scene.store)
    exchanged = {
        name: matrix for name in (*scene.coarse.units, *scene.coarse.dense) if (matrix := weight(name)) is not None
    }
    log_p = [log_softmax(rows) for rows in reference.forced_logits(scene.texts.pairs)]
    baseline = evaluate(data.task, data.validation.items, reference)
    with reference.weights(exchanged):
        logits = reference.forced_logits(scene.texts.pairs)
        value = evaluate(data.task, data.validation.items, reference)
    found, expected = trials.kl(scene.coarse, "coarse"), summarise_divergence(log_p, logits)
    assert found.mean == pytest.approx(expected.mean, rel=1e-3) and found.agreement == expected.agreement
    targets = [row for row, _ in zip(scene.texts.targets, logits, strict=True)]
    nll = [-log_softmax(rows)[range(len(row)), row] for rows, row in zip(logits, targets, strict=True)]
    (told,) = trials.answer_nll_each([scene.coarse], scene.store, len(nll), no_progress)
    assert told == pytest.approx(float(np.concatenate(nll).mean()), rel=1e-4)
    _, losses = trials.accepts(scene.coarse, 0.02, "coarse")
    # The runtime rounds what quantized matrices read to 8 bits.
    assert losses["perplexity"].loss == pytest.approx(compare(data.task, baseline, value).loss, abs=0.03)
    assert trials.baseline(data).value == pytest.approx(baseline.value, rel=1e-4)


def test_a_measurement_leaves_no_trace(scene: Scene, tmp_path: Path) -> None:
    """A failed measurement changes no later one, and leaves no file next to the output."""
    expected = scene.trials(tmp_path / "first").kl(finer(scene.coarse), "alone")
    fails = False

    def halt(done: int, total: int) -> None:
        if fails and done == 1:
            raise MemoryError

    trials = scene.trials(tmp_path / "second", walk=scene.walk(halt))
    trials.kl(scene.coarse, "coarse")
    trials.answer_nll_each([scene.coarse], scene.store, 2, no_progress)
    fails = True
    with pytest.raises(MemoryError):
        trials.kl(scene.plain, "plain")
    fails = False
    assert trials.kl(finer(scene.coarse), "again") == expected
    assert trials.kl(scene.plain, "plain").mean == 0.0
    trials.accepts(scene.coarse, 0.02, "coarse")
    with pytest.raises(MemoryError), trials.planned(scene.coarse):
        assert len(names(tmp_path / "second")) == 2, "the bundle of the plan lies next to the journal"
        raise MemoryError
    assert names(tmp_path / "second") == {"model.work"}


def test_weights_are_those_of_the_plan(scene: Scene) -> None:
    nothing, weight = planned_weights(scene.plain, scene.store), planned_weights(scene.coarse, scene.store)
    assert all(nothing(name) is None for name in (*scene.plain.units, *scene.plain.dense))
    for unit in scene.coarse.units:
        made = weight(unit)
        assert made is not None and torch.equal(made, scene.store.matrix(unit, QuantSpec(2, 32)).dequantize())
    for name, spec in scene.coarse.dense.items():
        made = weight(name)
        assert (made is None) == (spec.bitwidth == 16)
        assert made is None or torch.equal(made, scene.store.dense_matrix(name, spec).dequantize())


class NothingMeasured:
    """Answers and bundles that refuse every measurement."""

    def __init__(self, answers: AnswerTexts) -> None:
        self.answers = answers

    def measure_each(self, plans: Iterable[Any], items: int | None = None) -> Iterator[AnswerMeasures]:
        assert not list(plans), "a plan was measured although its result is in the journal"
        return iter(())

    def release(self) -> None:
        """Do nothing."""

    def opened(self, plan: CompilePlan, store: Any) -> Any:
        raise AssertionError("a bundle was opened although its result is in the journal")


def test_a_result_in_the_journal_is_taken_without_the_model(scene: Scene, tmp_path: Path) -> None:
    nothing = NothingMeasured(scene.texts)
    first, again = scene.trials(tmp_path), scene.trials(tmp_path, walk=nothing, bundles=nothing)
    found = [
        (
            trials.kl_each([scene.coarse, scene.plain], ["coarse", "plain"]),
            trials.accepts(scene.coarse, 0.02, "coarse"),
            trials.answer_nll_each([scene.coarse], scene.store, 2, no_progress),
            trials.baseline(trials.tasks[0]),
            trials.measured_items,
        )
        for trials in (first, again)
    ]
    assert found[0] == found[1]
    assert first.log == again.log
    other = scene.trials(tmp_path, "two", nothing, nothing)
    with pytest.raises(AssertionError, match="a plan was measured"):
        other.kl(scene.coarse, "coarse")
    with pytest.raises(AssertionError, match="a bundle was opened"):
        other.accepts(scene.coarse, 0.02, "coarse")


class CountedWalk(NothingMeasured):
    """Returns the bits of a plan as its KL, and records the plans of each call."""

    def __init__(self, answers: AnswerTexts) -> None:
        super().__init__(answers)
        self.calls: list[tuple[list[str], int | None]] = []

    def measure_each(
        self, plans: Iterable[tuple[CompilePlan, Any]], items: int | None = None
    ) -> Iterator[AnswerMeasures]:
        own = [plan for plan, _ in plans]
        self.calls.append(([plan.digest for plan in own], items))
        count = sum(self.answers.counts)
        for plan in own:
            number = np.full(count, plan.bits_per_weight)
            yield AnswerMeasures(number, np.ones(count, bool), 2 * number)


def test_only_missing_plans_are_measured_and_all_are_told_in_order(scene: Scene, tmp_path: Path) -> None:
    """A plan that is given twice is measured once."""
    walk, plain, coarse = CountedWalk(scene.texts), scene.plain, scene.coarse
    trials, bits = scene.trials(tmp_path, walk=walk), [scene.coarse.bits_per_weight, 16.0]
    trials.kl(coarse, "alone")
    found = trials.kl_each([plain, coarse, plain, finer(coarse)], ["a", "b", "c", "d"])
    assert walk.calls == [([coarse.digest], None), ([plain.digest, finer(coarse).digest], None)]
    assert [summary.mean for summary in found[:3]] == pytest.approx([bits[1], bits[0], bits[1]])
    assert [trial.purpose for trial in trials.log] == ["alone", "a", "b", "c", "d"]
    assert trials.measured_items == 3 * trials.kl_texts, "a measurement counts once"
    seen: list[tuple[int, int]] = []
    told = [
        trials.answer_nll_each(plans, scene.store, 3, lambda *at: seen.append(at))
        for plans in ([coarse], [plain, coarse])
    ]
    assert told == [[2 * bits[0]], [2 * bits[1], 2 * bits[0]]]
    assert walk.calls[2:] == [([coarse.digest], 3), ([plain.digest], 3)]
    assert seen == [(1, 1), (2, 2)], "what the journal has is done"
    assert trials.measured_items == 3 * trials.kl_texts + 2 * 3


def test_without_data_nothing_can_be_measured(scene: Scene, tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    trials = Trials(None, scene.bundles(tmp_path / "out"), scene.store, (), no_progress, journal, journal)
    assert not trials.has_data and trials.kl_texts == 0
    for refused in (
        lambda: trials.kl(scene.coarse, "x"),
        lambda: trials.accepts(scene.coarse, 0.02, "x"),
        lambda: trials.answer_nll_each([scene.coarse], scene.store, 1, no_progress),
    ):
        with pytest.raises(OptionError) as caught:
            refused()
        assert "--data" in str(caught.value.hint)


def test_divergence_against_its_definition() -> None:
    """The runtime's logits use numpy, the layers use torch. Both agree with the definition."""
    random = np.random.default_rng(1)
    p, q = random.normal(size=(2, 5, 11)).astype(np.float32) * 3
    probabilities = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (p, q)]
    expected = np.sum(probabilities[0] * np.log(probabilities[0] / probabilities[1]), axis=1)
    log_p, log_q = (torch.from_numpy(x).log_softmax(-1) for x in (p, q))
    kl, agrees = output_head.divergence(log_p, log_q)
    for found, same in (divergence(log_softmax(p), q), (kl.numpy(), agrees.numpy())):
        assert found == pytest.approx(expected, rel=1e-5)
        assert same.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    assert np.all(divergence(log_softmax(p), p)[0] < 1e-6)
    assert output_head.divergence(log_p, log_p)[0].tolist() == [0.0] * 5
    assert np.isfinite(log_softmax(np.array([[1e4, -1e4]], np.float32))).all()


class ScriptedBundles:
    """Bundles with given answers. The checkpoint fails unless `right`, and a plan also where `wrong`.

    generated: number of answers of plans.
    """

    def __init__(self, wrong: Sequence[bool], right: Sequence[bool] | None = None) -> None:
        self._wrong, self._right = wrong, right or [True] * len(wrong)
        self.generated = 0

    @contextmanager
    def opened(self, plan: CompilePlan, store: Any) -> Iterator[TextEngine]:
        yield cast(TextEngine, SimpleNamespace(generate=partial(self._answers, is_planned=store is not None)))

    def _answers(self, requests: Sequence[GenerationRequest], take: Take[Generation], is_planned: bool) -> None:
        self.generated += len(requests) if is_planned else 0
        for index, request in enumerate(requests):
            number = int(request.prompt.split("#")[1].split()[0])
            fault = (is_planned and self._wrong[number]) or not self._right[number]
            take(index, Generation(f"#### {number + fault}", 3, 5))


def scripted_trials(bundles: Any, folder: Path, *tasks: TaskData) -> Trials:
    """Return trials of a toy model. Only its answers are measured."""
    lowering = SimpleNamespace(model=toy_model(), spec_16bit=BF16)
    store = cast(UnitStore, SimpleNamespace(lowering=lowering, quantizer="rtn"))
    journal = open_journal(folder)
    return Trials(None, bundles, store, tasks, no_progress, journal, journal)


def sums(first: int, count: int, name: str = "gsm8k") -> TaskData:
    """Return numbered sums, with 4000 items of the certificate."""
    task = replace(find_task("gsm8k"), name=name)
    items = tuple({"question": f"#{n} ?", "answer": f"#### {n}"} for n in range(first, first + count))
    return TaskData(task, ItemSet(task, "made", items), 4000)


def scripted(
    wrong: Sequence[bool], tmp_path: Path, target: float, right: Sequence[bool] | None = None
) -> tuple[bool, Any, ScriptedBundles]:
    """Return whether a plan that fails on `wrong` is accepted, its estimate, and the bundles."""
    bundles = ScriptedBundles(wrong, right)
    trials = scripted_trials(bundles, tmp_path, sums(0, len(wrong)))
    accepted, losses = trials.accepts(plain_plan(toy_model(), BF16, "rtn"), target, "scripted")
    return accepted, losses["gsm8k"], bundles


@pytest.mark.parametrize(
    ("every", "accepted", "looked_at"),
    [
        (2, False, LOOKS[0]),  # half of the answers wrong: decided at the first look
        (20, False, LOOKS[0]),  # 5 % and a target of 2 %: just decided
        (62, False, 1400),  # 1.6 % and its margin are near 2 %: takes all items
        (120, True, 1400),  # 0.8 %: kept, but by less than three standard errors
    ],
)
def test_stopping_early_only_where_it_is_clear(every: int, accepted: bool, looked_at: int, tmp_path: Path) -> None:
    wrong = [n % every == every - 1 for n in range(1400)]
    found, loss, bundles = scripted(wrong, tmp_path, 0.02)
    assert (found, loss.n, bundles.generated) == (accepted, looked_at, looked_at)
    assert loss.loss == pytest.approx(sum(wrong[:looked_at]) / looked_at)
    if looked_at < len(wrong):
        assert abs(upper_bound(loss, 4000) - 0.02) > 3 * loss.standard_error


def test_a_look_at_items_that_the_checkpoint_does_not_solve_decides_nothing(tmp_path: Path) -> None:
    right = [n >= LOOKS[0] for n in range(1400)]
    found, loss, _ = scripted([False] * 1400, tmp_path, 0.02, right)
    assert found and loss.loss == 0 and loss.n > LOOKS[0]


def test_every_task_must_keep_the_target_and_the_first_that_does_not_ends_the_trial(tmp_path: Path) -> None:
    plan, tasks = plain_plan(toy_model(), BF16, "rtn"), (sums(0, 40, "first"), sums(40, 40, "second"))
    for wrong, told in (
        ([*[True] * 40, *[False] * 40], ["first"]),
        ([*[False] * 40, *[True] * 40], ["first", "second"]),
    ):
        bundles = ScriptedBundles(wrong)
        accepted, losses = scripted_trials(bundles, tmp_path / told[-1], *tasks).accepts(plan, 0.02, "scripted")
        assert not accepted and list(losses) == told and bundles.generated == 40 * len(told)
    fine = scripted_trials(ScriptedBundles([False] * 80), tmp_path / "fine", *tasks)
    assert fine.accepts(plan, 0.02, "scripted")[0] and fine.log[-1].accepted


def test_bounds_that_cannot_be_told_survive_the_journal(tmp_path: Path) -> None:
    """One of eight baseline answers is right. In a third of the resamples it is 0, and the loss has no value."""
    accepted, loss, _ = scripted([False] * 7 + [True], tmp_path, 0.5, right=[False] * 7 + [True])
    assert not accepted
    assert loss.interval95 == (-math.inf, math.inf) and loss.upper95 == math.inf
    again, same, bundles = scripted([False] * 8, tmp_path, 0.5, right=[False] * 7 + [True])
    assert (again, same, bundles.generated) == (accepted, loss, 0)


def test_a_baseline_of_zero_is_refused_with_the_other_targets(tmp_path: Path) -> None:
    bundles = ScriptedBundles([False] * 40, right=[False] * 40)
    trials = scripted_trials(bundles, tmp_path, sums(0, 40))
    for refused in (trials.require_baselines, lambda: trials.accepts(plain_plan(toy_model(), BF16, "rtn"), 0.02, "x")):
        with pytest.raises(OptionError, match="baseline scores 0") as caught:
            refused()
        assert all(option in str(caught.value.hint) for option in ("--kl", "--bits-per-weight", "--size"))


@given(st.floats(-0.5, 1), st.floats(0, 0.5), st.integers(1, 5000), st.integers(0, 9000), st.floats(0.0001, 0.9999))
def test_what_is_kept_is_within_one_standard_error(
    loss: float, standard_error: float, n: int, certification_items: int, target: float
) -> None:
    found = estimate(loss, standard_error, n)
    if keeps(found, target, certification_items):
        assert loss + standard_error <= target
    margins = [margin(standard_error, n, certification_items, level) for level in LEVELS]
    assert margins == sorted(margins), "each place of the list is safer than the one before"
    assert margin(standard_error, n, 10 * certification_items + 10) <= margins[0]


@pytest.mark.parametrize(
    ("items", "expected"),
    [(2000, 1.8808 + 0.5 * 2**0.5), (8000, 1.8808 / 2 + 0.5 * 1.25**0.5), (10**12, 0.5)],
)
def test_the_margin_makes_seven_of_ten_certificates_hold(items: int, expected: float) -> None:
    """1.88 c + 0.5 sqrt(s^2 + c^2), in units of s; n is 2,000 and c = s sqrt(n / n_test)."""
    assert margin(0.001, 2000, items) == pytest.approx(expected * 0.001, rel=1e-3)
