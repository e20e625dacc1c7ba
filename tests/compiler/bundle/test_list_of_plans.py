"""The list of plans that a certificate tests: its order, its share of the error, and the bundle that is left."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import numpy as np
import pytest

from moec.cli.terminal.report import verdict_line
from moec.compiler.bundle import certify as certifying
from moec.compiler.bundle.certify import TaskCertificate
from moec.compiler.request.targets import Target, TargetKind
from moec.compiler.search.bisect import candidates, search
from moec.compiler.sensitivity.acceptance import LEVELS, changed_share, margin
from moec.compiler.stages import bundle as bundle_stage
from moec.evaluation.statistics import ERROR, MIN_ITEMS, Verdict, judge, relative_loss
from moec.evaluation.tasks import find_task
from tests.compiler.search.toy_search import ToyTrials, predicted_loss, toy_space
from tests.tiny_compile import check_bundle, compile_tiny, contents, little_memory, names, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
LOSS = 0.3


@pytest.mark.parametrize("kind", ["loss", "kl"])
def test_a_search_hands_over_plans_of_falling_kl(kind: TargetKind) -> None:
    space = toy_space()
    kl = {}

    def measured(plan: Any) -> float:
        kl[plan.digest] = 0.02 * predicted_loss(space, plan)
        return kl[plan.digest]

    class Uncertain(ToyTrials):
        def kl(self, plan: Any, purpose: str, store: Any = None) -> Any:
            summary = super().kl(plan, purpose, store)
            return replace(summary, standard_error=summary.mean / 10)

    trials, target = Uncertain(measured, standard_error=0.002).as_trials(), Target(kind, 0.02)
    plans = candidates(space, trials, target, lambda _: None)
    assert len(plans) == len(LEVELS) == 5
    assert plans[0].digest == search(space, trials, target, lambda _: None).digest
    sizes = [plan.expert_packed_bytes + plan.dense_packed_bytes for plan in plans]
    assert sizes == sorted(sizes) and len(set(sizes)) == 5
    assert [kl[plan.digest] for plan in plans] == sorted((kl[plan.digest] for plan in plans), reverse=True)
    if kind == "kl":
        summaries = [trials.kl(plan, "") for plan in plans]
        bounds = [trials.kl_bound(each, level) for each, level in zip(summaries, LEVELS, strict=True)]
        assert min(bounds) > 0.017 and max(bounds) <= target.value
        cast(Any, trials).held_out_texts = (MIN_ITEMS - 1,)
        assert len(candidates(space, trials, target, lambda _: None)) == 1
    assert len(candidates(space, trials, Target("bits_per_weight", 4.0), lambda _: None)) == 1


def test_a_kl_at_the_limit_is_supported_with_the_probability_of_its_place() -> None:
    """Simulated: a measured plan at the limit of each place, and the certificate on other texts."""
    draw, deviation, (measured, held_out) = np.random.default_rng(7), 0.05, (256, 500)
    error, its_error = deviation / np.sqrt(measured), deviation / np.sqrt(held_out)
    for level in LEVELS:
        limit = 1 - margin(error, measured, held_out, level)
        true = limit + error * draw.standard_normal(100_000)  # what one measurement leaves open
        found = true + its_error * draw.standard_normal(100_000)
        supported = (found + level.bound_quantile * its_error <= 1).mean()
        assert supported == pytest.approx(NormalDist().cdf(level.quantile), abs=0.01)


def test_the_shares_sum_to_the_error_of_one_certificate() -> None:
    assert sum(level.share for level in LEVELS) == pytest.approx(1.0)
    assert [level.quantile for level in LEVELS] == sorted(level.quantile for level in LEVELS)


def test_the_list_errs_in_at_most_5_percent_at_every_loss() -> None:
    """Simulated where no plan keeps the target, with equal and with independent noise of the plans."""
    draw, target, error = np.random.default_rng(5), 0.02, 0.003
    for correlation in (0.0, 0.9, 1.0):
        common, false = draw.standard_normal(200_000), np.zeros(200_000, bool)
        for level in LEVELS:
            own = draw.standard_normal(200_000)
            noise = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
            false |= target + error * (noise + level.bound_quantile) <= target
        assert false.mean() <= ERROR + 0.002


class Judged:
    """Certifies as moec does, and then replaces the verdict of each test.

    verdicts: whether each test supports its plan; the last one is repeated.
    met_from: first test that measures a loss inside the target.
    """

    def __init__(self, *verdicts: bool, met_from: int = 1) -> None:
        self.verdicts, self.met_from, self.shares = list(verdicts), met_from, list[float]()

    def __call__(self, *arguments: Any) -> Any:
        self.shares.append(arguments[6])
        tasks, divergences = certifying.certify(*arguments)
        is_supported = self.verdicts[min(len(self.shares), len(self.verdicts)) - 1]
        judged = {}
        for name, certificate in tasks.items():
            verdict = replace(
                cast(Verdict, certificate.verdict),
                met=len(self.shares) >= self.met_from,
                supported=is_supported,
                refuted=False,
            )
            judged[name] = replace(cast(TaskCertificate, certificate), verdict=verdict)
        return judged, divergences


def compiled(model: Path, texts: Path, output: Path, judged: Judged, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(bundle_stage, "certify", judged)
    compile_tiny(model, output, "loss", LOSS, data=str(texts), tasks=("perplexity",), bits=(2, 4, 8))
    assert names(output.parent) >= {output.name} and not list(output.parent.glob("*.partial"))
    return check_bundle(output)


def test_the_bundle_is_the_first_supported_plan_of_the_list(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qualities, tests = {}, {}
    for name, verdicts in {"first": (True,), "second": (False, True), "none": (False,)}.items():
        judged = Judged(*verdicts)
        qualities[name] = compiled(model, texts, tmp_path / name, judged, monkeypatch)
        tests[name] = judged.shares
    assert len(qualities["none"]["tested"]) >= 2, "the search found a safer plan"
    assert tests["first"] == [0.6] and tests["second"] == [0.6, 0.15]
    assert tests["none"] == [level.share for level in LEVELS][: len(tests["none"])]
    for name, quality in qualities.items():
        rows = quality["tested"]
        taken = rows[1] if name == "second" else rows[0]
        assert quality["sizes"]["expert_packed_bytes"] == taken["expert_packed_bytes"]
        assert quality["tasks"]["perplexity"]["loss"]["error"] == pytest.approx(ERROR * taken["share_of_error"])
        assert [row["verdict"] for row in rows[:-1]] == ["met"] * (len(rows) - 1)
    assert (qualities["second"]["verdict"], qualities["none"]["verdict"]) == ("supported", "met")
    sizes = [row["expert_packed_bytes"] for row in qualities["none"]["tested"]]
    assert sizes == sorted(sizes)
    weights = [
        {k: v for k, v in contents(tmp_path / name).items() if k.startswith("experts")} for name in ("first", "none")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("met_from", "at", "verdict"), [(2, 1, "met"), (9, -1, "missed")])
def test_without_support_the_first_plan_that_keeps_the_target_is_taken(
    met_from: int, at: int, verdict: str, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality = compiled(model, texts, tmp_path / "out", Judged(False, met_from=met_from), monkeypatch)
    sizes = [row["expert_packed_bytes"] for row in quality["tested"]]
    assert len(set(sizes)) == len(sizes) > 1
    assert (quality["sizes"]["expert_packed_bytes"], quality["verdict"]) == (sizes[at], verdict)


def test_the_checkpoint_answers_held_out_items_once(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, checkpoint = list[object](), certifying.Turns.checkpoint
    monkeypatch.setattr(certifying.Turns, "checkpoint", lambda turns: opened.append(turns) or checkpoint(turns))
    quality = compiled(model, texts, tmp_path / "out", Judged(False), monkeypatch)
    assert len(opened) == 1 < len(quality["tested"])


@pytest.mark.parametrize(("items", "share"), [(1319, 0.0196), (4000, 0.0679)])
def test_the_share_of_answers_that_may_change(items: int, share: float) -> None:
    """The items of GSM8K as published, at 80 % and a target of 2 %; and the largest share that items still support."""
    gsm8k, target = find_task("gsm8k"), Target("loss", 0.02)
    changed = changed_share(gsm8k, 0.8, target, items)
    assert changed == pytest.approx(share, rel=0.02)
    width = (LEVELS[0].bound_quantile * (changed / items) ** 0.5 + 1 / items) / 0.8
    assert width == pytest.approx(target.value / 2)
    assert changed_share(find_task("perplexity"), 10.0, target, items) is None
    assert changed_share(gsm8k, 0.8, Target("loss", 0.3), items) is None


@pytest.mark.parametrize(("items", "changed", "target"), [(1319, 0.03, 0.026), (4000, 0.05, 0.019)])
def test_the_targets_that_the_items_of_gsm8k_support(items: int, changed: float, target: float) -> None:
    """Two rows of the table in docs/design/compile.md: the least target, in steps of 0.1 %."""
    right = round(0.8 * items)

    def is_supported(loss: float) -> bool:
        lost = math.ceil((changed * items + loss / 2 * right) / 2)
        baseline = np.arange(items) < right
        value = baseline.copy()
        value[:lost] = False
        value[right : right + round(changed * items) - lost] = True
        return judge(relative_loss(baseline, value, error=ERROR * LEVELS[0].share), loss).supported

    assert is_supported(target) and not is_supported(target - 0.001)


@pytest.mark.parametrize("has_tasks", [True, False])
def test_a_kl_is_tested_plan_by_plan(
    has_tasks: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are measured for the bundle that is left alone. The verdict has the error of its place in the list."""
    texts, measured = save_texts(tmp_path / "texts", train=30, validation=20, test=MIN_ITEMS), list[str]()
    if not has_tasks:
        little_memory(monkeypatch.setattr)

    def judged(*arguments: Any) -> Any:
        assert arguments[7] != has_tasks, "a test may end early where plans are dear: memory does not hold the model"
        places = [level.share for level in LEVELS]
        worse = 10.0 if places.index(arguments[6]) < 1 else 0.01  # the first plan is refused, the second supported
        *others, refuses = arguments

        def refused(divergences: Any) -> bool:
            measured.append("kl")
            return bool(refuses({name: scaled(part) for name, part in divergences.items()}))

        def scaled(part: Any) -> Any:
            return replace(part, divergence=replace(part.divergence, mean=worse * part.divergence.mean))

        tasks, divergences = certifying.certify(*others, refused)
        measured.extend(tasks)
        return {n: scaled(part) for n, part in tasks.items()}, {n: scaled(part) for n, part in divergences.items()}

    monkeypatch.setattr(bundle_stage, "certify", judged)
    options: dict[str, Any] = {"data": str(texts), "tasks": ("perplexity",), "bits": (2, 4, 8)}
    compile_tiny(model, tmp_path / "out", "kl", 0.02, **options)
    quality = check_bundle(tmp_path / "out")
    first, second = quality["tested"]
    assert (first["verdict"], second["verdict"], quality["verdict"]) == ("refuted", "supported", "supported")
    assert second["bounds"]["perplexity"] <= 0.02 < first["bounds"]["perplexity"]
    assert quality["sizes"]["expert_packed_bytes"] == second["expert_packed_bytes"]
    assert bool(quality["tasks"]) == has_tasks and measured == (["kl", "kl", "perplexity"] if has_tasks else [])
    assert "0.02" in verdict_line(quality)
