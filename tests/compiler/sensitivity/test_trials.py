"""Trials: what is measured, that measuring leaves no trace in the model, and when it may stop early."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.request.plan import CompilePlan
from moec.compiler.sensitivity.sensitivity import plain_plan
from moec.compiler.sensitivity.trials import LOOKS, Reference, TaskData, Trials, keeps, margin
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.data import ItemSet
from moec.evaluation.divergence import divergence, log_softmax
from moec.evaluation.engine import Generation, GenerationRequest
from moec.evaluation.tasks import find_task
from moec.manifests.errors import OptionError
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, estimate, toy_model
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ("one small text", "another text, a little longer", "third", "and a fourth one here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixtral(tmp_path_factory.mktemp("trials") / "tiny", TinyMixtral(width=64))


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceModel:
    return ReferenceModel(folder)


@pytest.fixture(scope="module")
def store(folder: Path) -> UnitStore:
    return UnitStore(lower(open_checkpoint(str(folder))), None, "rtn")


def silent(done: int, total: int) -> None:
    """Nobody watches."""


def task_data(texts: Sequence[str] = TEXTS, certification_items: int = 500) -> TaskData:
    task = find_task("perplexity")
    return TaskData(task, ItemSet(task, "made", tuple({"text": text} for text in texts)), certification_items)


def make_trials(
    reference: Any, store: Any, folder: Path, data: TaskData | None = None, identity: str = "one"
) -> Trials:
    journal = Journal(folder / "model.work", identity, Disk())
    return Trials(cast(Reference, reference), store, (data or task_data(),), 64, silent, journal)


def plans(store: UnitStore) -> tuple[CompilePlan, CompilePlan]:
    """All at 16 bits, and everything at 2 bits with 4-bit attention and embedding."""
    plain = plain_plan(store.model, BF16, "rtn")
    shapes = store.model.dense_shapes()
    dense = {n: QuantSpec(4) if len(s) == 2 and not n.endswith("router") else BF16 for n, s in shapes.items()}
    return plain, replace(plain, units=dict.fromkeys(plain.units, QuantSpec(2, 32)), dense=dense)


def snapshot(reference: ReferenceModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in reference.network.model.named_parameters()}


def is_untouched(reference: ReferenceModel, before: dict[str, torch.Tensor]) -> bool:
    after = dict(reference.network.model.named_parameters())
    return before.keys() == after.keys() and all(
        torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before
    )


def test_the_plain_plan_has_no_divergence(reference: ReferenceModel, store: UnitStore, tmp_path: Path) -> None:
    plain, coarse = plans(store)
    trials = make_trials(reference, store, tmp_path)
    nothing, much = trials.kl(plain, "plain"), trials.kl(coarse, "coarse")
    assert (nothing.mean, nothing.max, nothing.agreement) == (0.0, 0.0, 1.0)
    assert much.mean > 0.01 and much.agreement < 1.0
    assert [trial.purpose for trial in trials.log] == ["plain", "coarse"]
    assert trials.log[1].expert_packed_bytes == coarse.expert_packed_bytes
    assert trials.accepts(plain, 0.02, "plain")[1]["perplexity"].loss == 0.0


def test_measuring_changes_no_weight(
    reference: ReferenceModel, store: UnitStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, (_, coarse) = snapshot(reference), plans(store)
    trials = make_trials(reference, store, tmp_path)
    trials.kl(coarse, "coarse")
    trials.accepts(coarse, 0.02, "coarse")
    trials.answer_nll(coarse, store, 2)
    assert is_untouched(reference, before)

    def fails(*arguments: Any, **options: Any) -> Any:
        assert not is_untouched(reference, before), "the plan was not applied"
        raise MemoryError

    monkeypatch.setattr(reference, "answer_log_probs", fails)
    monkeypatch.setattr(reference, "forced_logits", fails)
    other = replace(coarse, units=dict.fromkeys(coarse.units, QuantSpec(3, 32)))
    for measure in (
        lambda: trials.kl(other, "other"),
        lambda: trials.accepts(other, 0.02, "other"),
        lambda: trials.answer_nll(other, store, 2),
    ):
        with pytest.raises(MemoryError):
            measure()
        assert is_untouched(reference, before)


def test_weights_are_those_of_the_plan(reference: ReferenceModel, store: UnitStore, tmp_path: Path) -> None:
    plain, coarse = plans(store)
    trials = make_trials(reference, store, tmp_path)
    assert trials.weights_of(plain) == {}
    weights = trials.weights_of(coarse)
    assert set(weights) == set(coarse.units) | {n for n, spec in coarse.dense.items() if spec.bitwidth < 16}
    unit = next(iter(coarse.units))
    assert torch.equal(weights[unit], store.matrix(unit, QuantSpec(2, 32)).dequantize())


class NoModel:
    """A reference that may be asked for tokens and for nothing else."""

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        return [], [1]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"`{name}` was called although the result is in the journal")


def test_a_result_in_the_journal_is_taken_without_the_model(
    reference: ReferenceModel, store: UnitStore, tmp_path: Path
) -> None:
    _, coarse = plans(store)
    first, again = (make_trials(model, store, tmp_path) for model in (reference, NoModel()))
    found = [
        (
            trials.kl(coarse, "coarse"),
            trials.accepts(coarse, 0.02, "coarse"),
            trials.answer_nll(coarse, store, 2),
            trials.baseline(trials.tasks[0]),
        )
        for trials in (first, again)
    ]
    assert found[0] == found[1]
    assert first.log == again.log
    with pytest.raises(AssertionError, match="was called"):
        make_trials(NoModel(), store, tmp_path, identity="two").kl(coarse, "coarse")


def test_without_data_nothing_can_be_measured(store: UnitStore, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "model.work", "one", Disk())
    trials = Trials(None, store, (), 0, silent, journal)
    assert not trials.has_data
    _, coarse = plans(store)
    for refused in (lambda: trials.kl(coarse, "x"), lambda: trials.accepts(coarse, 0.02, "x")):
        with pytest.raises(OptionError) as caught:
            refused()
        assert "--data" in str(caught.value.hint)


def test_divergence_against_its_definition() -> None:
    random = np.random.default_rng(1)
    p, q = random.normal(size=(2, 5, 11)).astype(np.float32) * 3
    kl, same = divergence(log_softmax(p), q)
    probabilities = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (p, q)]
    expected = np.sum(probabilities[0] * np.log(probabilities[0] / probabilities[1]), axis=1)
    assert kl == pytest.approx(expected, rel=1e-5)
    assert same.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    assert np.all(divergence(log_softmax(p), p)[0] < 1e-6)
    assert np.isfinite(log_softmax(np.array([[1e4, -1e4]], np.float32))).all()


class ScriptedModel:
    """Answers `right` until weights are exchanged, then wrongly where `wrong` says so; counts what it is asked for."""

    def __init__(self, wrong: Sequence[bool], right: Sequence[bool] | None = None) -> None:
        self._wrong, self._right = wrong, right or [True] * len(wrong)
        self._is_exchanged = False
        self.generated = 0

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        return [1], [2]

    @contextmanager
    def weights(self, mapping: Any) -> Iterator[None]:
        self._is_exchanged = True
        yield
        self._is_exchanged = False

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[Generation]:
        numbers = [int(request.prompt.split("#")[1].split()[0]) for request in requests]
        self.generated += len(requests) if self._is_exchanged else 0
        faults = [(self._is_exchanged and self._wrong[n]) or not self._right[n] for n in numbers]
        return [Generation(f"#### {n + fault}", 3, 5) for n, fault in zip(numbers, faults, strict=True)]


def scripted(
    wrong: Sequence[bool], tmp_path: Path, target: float, right: Sequence[bool] | None = None
) -> tuple[bool, Any, ScriptedModel]:
    """Return whether a plan that fails on `wrong` is accepted, its estimate, and the model that answered."""
    task = find_task("gsm8k")
    items = tuple({"question": f"#{n} ?", "answer": f"#### {n}"} for n in range(len(wrong)))
    model = ScriptedModel(wrong, right)
    plain = plain_plan(toy_model(), BF16, "rtn")
    trials = make_trials(model, None, tmp_path, TaskData(task, ItemSet(task, "made", items), 4000))
    accepted, losses = trials.accepts(plain, target, "scripted")
    return accepted, losses["gsm8k"], model


@pytest.mark.parametrize(
    ("every", "accepted", "looked_at"),
    [
        (2, False, LOOKS[0]),  # half of the answers gone: clear after the first look
        (20, False, LOOKS[0]),  # 5 % against 2 %: clear, just so
        (62, False, 1400),  # 1.6 % and its margin are near 2 %: to the end
        (120, True, 1400),  # 0.8 %: kept, and not by three standard errors
    ],
)
def test_stopping_early_only_where_it_is_clear(every: int, accepted: bool, looked_at: int, tmp_path: Path) -> None:
    wrong = [n % every == every - 1 for n in range(1400)]
    found, loss, model = scripted(wrong, tmp_path, 0.02)
    assert (found, loss.n, model.generated) == (accepted, looked_at, looked_at)
    assert loss.loss == pytest.approx(sum(wrong[:looked_at]) / looked_at)
    if looked_at < len(wrong):
        assert abs(loss.loss + margin(loss, 4000) - 0.02) > 3 * loss.standard_error


def test_bounds_that_cannot_be_told_survive_the_journal(tmp_path: Path) -> None:
    """A baseline of one right answer in eight: in a third of the resamples it is 0 and the loss has no value."""
    accepted, loss, _ = scripted([False] * 7 + [True], tmp_path, 0.5, right=[False] * 7 + [True])
    assert not accepted
    assert loss.interval95 == (-math.inf, math.inf) and loss.upper95 == math.inf
    again, same, model = scripted([False] * 8, tmp_path, 0.5, right=[False] * 7 + [True])
    assert (again, same, model.generated) == (accepted, loss, 0)


def test_a_baseline_of_zero_is_refused_with_the_other_targets(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="baseline scores 0") as caught:
        scripted([False] * 40, tmp_path, 0.02, right=[False] * 40)
    assert all(option in str(caught.value.hint) for option in ("--kl", "--bits-per-weight", "--size"))


@given(st.floats(-0.5, 1), st.floats(0, 0.5), st.integers(1, 5000), st.integers(0, 9000), st.floats(0.0001, 0.9999))
def test_what_is_kept_is_within_one_standard_error(
    loss: float, standard_error: float, n: int, certification_items: int, target: float
) -> None:
    found = estimate(loss, standard_error, n)
    if keeps(found, target, certification_items):
        assert loss + standard_error <= target
    assert margin(found, certification_items) >= standard_error
    assert margin(found, 10 * certification_items + 10) <= margin(found, certification_items)
