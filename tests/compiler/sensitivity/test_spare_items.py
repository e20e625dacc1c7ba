"""More items for a loss that is known too roughly: the number, their origin, and the same number in a resumed run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moec.compiler.preflight.preparation import prepare
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.sensitivity.acceptance import PRECISION, is_clear, items_for_precision
from moec.compiler.sensitivity.trials import LOOKS, TaskData, Trials
from moec.compiler.stages import encode_texts
from moec.evaluation.data import ItemSet
from moec.evaluation.engine import AnswerScore, Take, TextEngine
from moec.evaluation.tasks import Item, find_task
from tests.compiler.search.toy_search import BF16, toy_model
from tests.compiler.sensitivity.test_trials import scripted_trials
from tests.tiny_compile import compile_tiny, make_request, save_model, save_problems, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
TARGET = 0.02
VALIDATION = 40
TEST = 160


def texts(first: int, count: int) -> tuple[Item, ...]:
    """Return numbered texts."""
    return tuple({"text": f"#{n} "} for n in range(first, first + count))


class NoisyTexts:
    """Bundles whose plans raise the NLL of each token of a text by a mean and a deviation of that text.

    opened_plans: for each opened bundle of a plan, the number of texts that it scored.
    scored: for each opened bundle of the checkpoint, the number of texts that it scored.
    """

    def __init__(self, mean: float, deviation: float) -> None:
        self.rise = mean + deviation * np.random.default_rng(6).standard_normal(5000)
        self.opened_plans: list[int] = []
        self.scored: list[int] = []
        self._open = 0

    @contextmanager
    def opened(self, plan: CompilePlan, store: Any) -> Iterator[TextEngine]:
        assert not self._open, "two bundles at once take the memory of two"
        self._open += 1
        counts = self.scored if store is None else self.opened_plans
        counts.append(0)

        def scores(pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
            counts[-1] += len(pairs)
            for index, pair in enumerate(pairs):
                number = int("".join(pair).split("#")[1].split()[0])
                take(index, AnswerScore(20 * (2 + (0.0 if store is None else self.rise[number])), 20))

        yield cast(TextEngine, SimpleNamespace(answer_log_probs=scores))
        self._open -= 1


def noisy_trials(
    bundles: NoisyTexts, folder: Path, spare: int, validation: int = VALIDATION, test: int = TEST
) -> Trials:
    """Return trials on numbered texts. The spare ones follow those of validation."""
    task = find_task("perplexity")
    own, more = texts(0, validation), texts(validation, spare)
    data = TaskData(task, ItemSet(task, "made", own), test, (), more)
    return scripted_trials(bundles, folder, data)


def plan_number(number: int) -> CompilePlan:
    """Return one of several plans."""
    return plain_plan(toy_model(layers=number + 1), BF16, "rtn")


def test_a_loss_near_the_target_takes_as_many_texts_as_its_precision_needs(tmp_path: Path) -> None:
    """40 texts with a standard error of half the target need about four times as many."""
    alone = noisy_trials(NoisyTexts(0.003, 0.06), tmp_path / "alone", 0)
    accepted, losses = alone.accepts(plan_number(0), TARGET, "search")
    rough = losses["perplexity"]
    needed = items_for_precision(rough, TARGET)
    assert not accepted and rough.n == VALIDATION and rough.standard_error > PRECISION * TARGET
    assert 3 * VALIDATION < needed < 6 * VALIDATION
    bundles = NoisyTexts(0.003, 0.06)
    trials = noisy_trials(bundles, tmp_path / "more", 1000)
    accepted, losses = trials.accepts(plan_number(0), TARGET, "search")
    found = losses["perplexity"]
    assert found.n == needed and found.standard_error == pytest.approx(PRECISION * TARGET, rel=0.2)
    assert bundles.scored == [VALIDATION, needed - VALIDATION], "the checkpoint scores each text once"
    assert trials.available_items == {"perplexity": (VALIDATION, VALIDATION + 1000)}
    assert accepted, "at 0.3 %, the plan was refused only because its loss was known too roughly"


def test_later_plans_are_measured_on_the_same_texts(tmp_path: Path) -> None:
    bundles = NoisyTexts(0.005, 0.06)
    trials = noisy_trials(bundles, tmp_path, 1000)
    counts = [trials.accepts(plan_number(at), TARGET, "search")[1]["perplexity"].n for at in range(3)]
    assert len(set(counts)) == 1 and counts[0] > VALIDATION
    assert bundles.opened_plans == [VALIDATION, counts[0], counts[0], counts[0]]
    assert trials.measured_items == counts[0] + 3 * counts[0]


def test_no_more_texts_are_taken_than_the_data_holds(tmp_path: Path) -> None:
    trials = noisy_trials(NoisyTexts(0.005, 0.06), tmp_path, 25)
    found = trials.accepts(plan_number(0), TARGET, "search")[1]["perplexity"]
    assert found.n == VALIDATION + 25 < items_for_precision(found, TARGET)


@pytest.mark.parametrize(("mean", "deviation"), [(0.3, 0.06), (0.01, 0.01)], ids=["clearly refused", "precise"])
def test_no_text_is_taken_where_none_is_needed(mean: float, deviation: float, tmp_path: Path) -> None:
    bundles = NoisyTexts(mean, deviation)
    found = noisy_trials(bundles, tmp_path, 1000).accepts(plan_number(0), TARGET, "search")[1]["perplexity"]
    assert found.n == VALIDATION and bundles.scored == [VALIDATION] and bundles.opened_plans == [VALIDATION]
    assert is_clear(found, TARGET, TEST) or found.standard_error <= PRECISION * TARGET


def test_a_clear_plan_stops_before_the_spare_texts(tmp_path: Path) -> None:
    bundles = NoisyTexts(0.005, 0.06)
    trials = noisy_trials(bundles, tmp_path, 1000)
    trials.accepts(plan_number(0), TARGET, "search")
    bundles.rise += 0.5
    assert trials.accepts(plan_number(1), TARGET, "search")[1]["perplexity"].n == VALIDATION


def test_a_resumed_run_takes_the_same_texts_and_counts_them_alike(tmp_path: Path) -> None:
    first = noisy_trials(NoisyTexts(0.005, 0.06), tmp_path, 1000)
    told = [first.accepts(plan_number(at), TARGET, "search") for at in range(2)]
    bundles = NoisyTexts(0.005, 0.06)
    again = noisy_trials(bundles, tmp_path, 1000)
    assert [again.accepts(plan_number(at), TARGET, "search") for at in range(2)] == told
    assert again.measured_items == first.measured_items
    assert bundles.opened_plans == bundles.scored == []
    assert again.accepts(plan_number(2), TARGET, "search") == first.accepts(plan_number(2), TARGET, "search")


def test_a_run_killed_after_the_choice_measures_the_same(tmp_path: Path) -> None:
    class Killed(NoisyTexts):
        @contextmanager
        def opened(self, plan: CompilePlan, store: Any) -> Iterator[TextEngine]:
            if store is not None and self.opened_plans:
                raise KeyboardInterrupt
            with super().opened(plan, store) as engine:
                yield engine

    expected = noisy_trials(NoisyTexts(0.005, 0.06), tmp_path / "whole", 1000).accepts(plan_number(0), TARGET, "search")
    with pytest.raises(KeyboardInterrupt):
        noisy_trials(Killed(0.005, 0.06), tmp_path / "killed", 1000).accepts(plan_number(0), TARGET, "search")
    resumed = noisy_trials(NoisyTexts(0.005, 0.06), tmp_path / "killed", 1000)
    assert resumed.accepts(plan_number(0), TARGET, "search") == expected


def test_looks_end_with_the_validation_texts(tmp_path: Path) -> None:
    """A trial that is not clear on all validation texts goes to the last text that is taken."""
    bundles = NoisyTexts(0.012, 0.5)
    trials = noisy_trials(bundles, tmp_path, 4000, LOOKS[0] - 100, 4000)
    assert trials.accepts(plan_number(0), TARGET, "search")[1]["perplexity"].n > LOOKS[1]


@pytest.mark.usefixtures("few_tokens")
def test_spare_texts_are_those_that_nothing_else_reads(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "tiny"), save_texts(tmp_path / "texts", train=40, validation=3, test=6)
    prepared = prepare(make_request(model, tmp_path / "out", "kl", 0.1, data=str(data), tasks=("perplexity",)))
    found = encode_texts.encode_all_texts(prepared)
    split = prepared.splits[0]
    tokenizer = encode_texts.load_tokenizer(prepared.checkpoint.root)
    texts_of = [(split.task.prompt(item), split.task.answer(item)) for item in split.train.items]
    rows = [before + answer for before, answer in encode_texts.encode_pairs(tokenizer, texts_of)]
    spare = [row for row, item in zip(rows, split.train.items, strict=True) if item in found.spare["perplexity"]]
    assert 20 < len(spare) < 40
    calibrated = found.calibration.rows
    assert len(spare) + len(calibrated) <= len(rows) and all(row not in calibrated for row in spare)
    assert all(row not in spare for row in rows[:4]), "gradients read the first texts"
    held = {item["text"] for part in (split.validation, split.test) for item in part.items}
    assert held.isdisjoint(item["text"] for item in found.spare["perplexity"])


@pytest.mark.usefixtures("few_tokens")
def test_a_task_with_generated_answers_has_no_spare_items(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "tiny"), save_problems(tmp_path / "sums", train=40)
    prepared = prepare(make_request(model, tmp_path / "out", "kl", 0.1, data=str(data), tasks=("gsm8k",)))
    assert encode_texts.encode_all_texts(prepared).spare == {"gsm8k": ()}


@pytest.mark.usefixtures("few_tokens")
def test_a_compile_with_few_validation_texts_takes_train_texts_and_says_so(tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "tiny"), save_texts(tmp_path / "texts", train=40, validation=3, test=6)
    told: list[str] = []
    request = make_request(
        model, tmp_path / "out", "loss", 0.01, data=str(data), tasks=("perplexity",), plan_only=True, swaps=0
    )
    request.talk.note = told.append
    found = compile_tiny(model, tmp_path / "out", "loss", 0.01, data=str(data), tasks=("perplexity",), plan_only=True,
                         swaps=0, talk=request.talk)  # fmt: skip
    counts = {loss["n"] for trial in found.quality["trials"] for loss in trial["losses"].values()}
    assert max(counts) > 3
    assert any(
        f"{max(counts) - 3} train texts that neither calibration nor gradients use join the 3 validation texts" in t
        for t in told
    )
