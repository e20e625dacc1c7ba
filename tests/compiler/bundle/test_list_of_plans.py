"""The list of plans that a certificate tests: its order, its share of the error, and the bundle that is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from moec.compiler.bundle import certify as certifying
from moec.compiler.bundle.certify import TaskCertificate
from moec.compiler.request.targets import Target
from moec.compiler.search.bisect import candidates, search
from moec.compiler.sensitivity.acceptance import LEVELS, changed_share
from moec.compiler.stages import bundle as bundle_stage
from moec.evaluation.statistics import ERROR, Verdict
from moec.evaluation.tasks import find_task
from tests.compiler.search.toy_search import ToyTrials, predicted_loss, toy_space
from tests.tiny_compile import check_bundle, compile_tiny, contents, names

pytestmark = pytest.mark.usefixtures("one_thread")
LOSS = 0.3


def test_a_search_hands_over_plans_of_falling_kl() -> None:
    space = toy_space()
    kl = {}

    def measured(plan: Any) -> float:
        kl[plan.digest] = 0.02 * predicted_loss(space, plan)
        return kl[plan.digest]

    trials = ToyTrials(measured, standard_error=0.002).as_trials()
    plans = candidates(space, trials, Target("loss", 0.02), lambda _: None)
    assert len(plans) == len(LEVELS) == 3
    assert plans[0].digest == search(space, trials, Target("loss", 0.02), lambda _: None).digest
    sizes = [plan.expert_packed_bytes + plan.dense_packed_bytes for plan in plans]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3
    assert [kl[plan.digest] for plan in plans] == sorted((kl[plan.digest] for plan in plans), reverse=True)
    for target in (Target("kl", 0.02), Target("bits_per_weight", 4.0)):
        assert len(candidates(space, trials, target, lambda _: None)) == 1


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
        self.shares.append(arguments[-1])
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
    assert tests["first"] == [0.7] and tests["second"] == [0.7, 0.2]
    assert tests["none"] == [level.share for level in LEVELS][: len(tests["none"])]
    for name, quality in qualities.items():
        rows = quality["tested"]
        taken = rows[1] if name == "second" else rows[0]
        assert quality["sizes"]["expert_packed_bytes"] == taken["expert_packed_bytes"]
        assert quality["tasks"]["perplexity"]["loss"]["error"] == pytest.approx(ERROR * taken["share_of_error"])
        assert [row["verdict"] for row in rows[:-1]] == ["not supported"] * (len(rows) - 1)
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
    evaluate, titles = certifying.certify_task.__globals__["evaluate"], list[str]()

    def watched(task: Any, items: Any, engine: Any, **more: Any) -> Any:
        titles.append(type(engine).__name__ if engine is None else f"{len(items)}")
        return evaluate(task, items, engine, **more)

    monkeypatch.setattr("moec.compiler.bundle.certify.evaluate", watched)
    quality = compiled(model, texts, tmp_path / "out", Judged(False), monkeypatch)
    assert len(titles) == 1 + len(quality["tested"])


@pytest.mark.parametrize(("items", "share"), [(1319, 0.0257), (4000, 0.078)])
def test_the_share_of_answers_that_may_change(items: int, share: float) -> None:
    """The items of GSM8K as published, at 80 % and a target of 2 %; and the largest share that items still support."""
    gsm8k, target = find_task("gsm8k"), Target("loss", 0.02)
    changed = changed_share(gsm8k, 0.8, target, items)
    assert changed == pytest.approx(share, rel=0.02)
    width = LEVELS[0].bound_quantile * (changed / items) ** 0.5 / 0.8
    assert width == pytest.approx(target.value / 2)
    assert changed_share(find_task("perplexity"), 10.0, target, items) is None
    assert changed_share(gsm8k, 0.8, Target("loss", 0.3), items) is None
