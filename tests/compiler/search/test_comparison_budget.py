"""The work of comparisons is counted: a third of all measurements, or all comparisons if they are small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moec.compiler.forecast import forecast
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.search import comparison_budget
from moec.compiler.search.comparison_budget import (
    BY_USE,
    FREE_MULTIPLICATIONS,
    OURS,
    PUBLISHED,
    UNIFORM,
    ItemCounts,
    affordable,
    baseline_items,
)
from moec.compiler.sensitivity.trials import Trials
from moec.profiles.weight_counts import active_weights
from tests.tiny_compile import check_bundle, contents, make_request, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = frozenset(BY_USE)
NEEDS = {UNIFORM: 10, PUBLISHED: 40, OURS: 40}
KL: dict[str, Any] = {"kind": "kl", "value": 0.05, "quick": False, "group_sizes": (32,), "bits": (2, 4, 16)}


@pytest.mark.parametrize(
    ("searched", "chosen"),
    [(0, ()), (19, ()), (20, (UNIFORM,)), (99, (UNIFORM,)), (100, (UNIFORM, OURS)), (180, BY_USE)],
)
def test_a_third_of_what_is_measured(searched: int, chosen: tuple[str, ...]) -> None:
    found = affordable(NEEDS, searched, FREE_MULTIPLICATIONS)
    assert found == set(chosen)
    assert 2 * sum(NEEDS[name] for name in found) <= searched


def test_little_work_is_free_whatever_was_searched() -> None:
    assert affordable(NEEDS, 0, FREE_MULTIPLICATIONS / 90) == EVERY
    assert affordable(NEEDS, 0, FREE_MULTIPLICATIONS / 89) == frozenset()


def test_edgemoe_is_not_measured_without_the_uniform_format_it_starts_from() -> None:
    assert affordable({UNIFORM: 60, PUBLISHED: 40, OURS: 40}, 100, FREE_MULTIPLICATIONS) == frozenset()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("budget") / "tiny", layers=2, experts=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_texts(tmp_path_factory.mktemp("budget-data") / "texts", train=4, validation=8, test=6))


def test_the_example_is_compared_in_full(tmp_path: Path) -> None:
    """The project shows these comparisons. Their maximum is well below the limit for every model."""
    from moec.compiler.preflight.preparation import prepare

    data = {"data": "examples/data/gsm8k", "tasks": ("gsm8k",)}
    prepared = prepare(make_request(Path("examples/model"), tmp_path / "out", "loss", 0.02, quick=False, **data))
    validation = len(prepared.splits[0].validation.items)
    needs = baseline_items(
        prepared.lowering.model, len(prepared.specs), ItemCounts.of(256, validation, validation, is_loss=True)
    )
    assert 2 * sum(needs.values()) * 100 * active_weights(prepared.lowering.model) < FREE_MULTIPLICATIONS
    assert 2 * sum(needs.values()) > (1 + 8) * validation, "by its share alone it would not be"


def test_a_compile_leaves_out_what_is_too_much_and_says_so(
    model: Path, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_budget, "FREE_MULTIPLICATIONS", 0)
    searched, trials, notes = list[int](), list[Trials](), list[str]()

    def watched(found: Trials, formats: int, is_loss: bool) -> frozenset[str]:
        searched.append(found.measured_items)
        trials.append(found)
        return comparison_budget.affordable_here(found, formats, is_loss)

    monkeypatch.setattr("moec.compiler.stages.planning.affordable_here", watched)
    for name in ("one", "two"):
        request = make_request(model, tmp_path / name, data=texts, **KL, swaps=8)
        request.talk.note = notes.append
        compile_checkpoint(request)
        compared = trials[-1].measured_items - searched[-1] - trials[-1].kl_texts  # and the KL of the plan
        assert 0 < compared <= searched[-1] // 2
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    comparison = check_bundle(tmp_path / "one")["comparison"]
    assert [row["name"] for row in comparison["baselines"]] == [UNIFORM]
    assert comparison["left_out"] == [PUBLISHED, OURS]
    (sentence,) = {note for note in notes if "not compared with" in note}
    assert "EdgeMoE as published and EdgeMoE with our quantizer" in sentence and "`moec compare`" in sentence


def test_what_is_asked_for_is_measured_in_full(
    model: Path, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_checkpoint(make_request(model, tmp_path / "free", data=texts, **KL, swaps=0))
    monkeypatch.setattr(comparison_budget, "FREE_MULTIPLICATIONS", 0)
    compile_checkpoint(make_request(model, tmp_path / "asked", data=texts, **KL, swaps=0, comparisons=True))
    compile_checkpoint(make_request(model, tmp_path / "none", data=texts, **KL, swaps=0, comparisons=False))
    assert contents(tmp_path / "free") == contents(tmp_path / "asked")
    assert len(check_bundle(tmp_path / "asked")["comparison"]["baselines"]) == 3
    assert check_bundle(tmp_path / "none")["comparison"] is None


def test_an_estimate_has_at_most_a_third_of_comparisons(
    model: Path, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(**values: Any) -> tuple[float, float, str]:
        request = make_request(model, tmp_path / "out", data=texts, **{**KL, "kind": "loss", "value": 0.5, **values})
        stages = forecast(request)
        found = [stage for stage in stages if stage.title.startswith("comparing")]
        return sum(s.seconds for s in found), sum(s.seconds for s in stages), "".join(s.work for s in found)

    assert "3 experts" not in stage()[2] and "6 experts twice" in stage()[2]
    monkeypatch.setattr(comparison_budget, "FREE_MULTIPLICATIONS", 0)
    compared, whole, work = stage()
    assert compared <= whole / 3 and "`moec compare`" in work
    assert stage(comparisons=False)[2] == "" and "6 experts twice" in stage(comparisons=True)[2]
