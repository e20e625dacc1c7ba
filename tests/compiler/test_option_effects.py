"""Every field of the options of a compile has a visible effect on the compile."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moec.compiler.bundle import certify
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import CompileResult
from moec.compiler.sensitivity.gradients import LayerGradients
from moec.compiler.stages import encode_texts, measure, planning
from moec.evaluation.tasks.task_settings import TaskSettings
from tests.tiny_compile import compile_tiny, make_request, save_problems

pytestmark = pytest.mark.usefixtures("one_thread")
WATCHED = {
    "choose_texts": encode_texts,
    "Sweep": measure,
    "run": LayerGradients,
    "choose_objective": planning,
    "candidates": planning,
    "certify_task": certify,
    "compare_with_baselines": planning,
}
"""Names of stages, and where each is looked up."""


class Effect(NamedTuple):
    """A change of a field and its effect.

    value: another value than the default.
    others: further options of both compiles.
    seen: the difference between the two.
    """

    value: Any
    others: dict[str, Any]
    seen: Callable[[Any], Any]


def texts_of(found: Prepared) -> list[object]:
    return [list(split.train.items) for split in found.splits]


# Options that are checked and data that is read before any work.
PREPARED: dict[str, Effect] = {
    "data": Effect("{data}", {}, lambda found: len(found.splits)),
    "tasks": Effect(("perplexity",), {"data": "{data}"}, lambda found: [each.task.name for each in found.splits]),
    "limit": Effect(2, {"data": "{data}"}, lambda found: [len(each.train) for each in found.splits]),
    "seed": Effect(7, {"data": "{data}", "limit": 4}, texts_of),
    "shots": Effect(1, {"data": "{data}"}, lambda found: [len(shots) for shots in found.shots.values()]),
    "long_items": Effect(
        "skip", {"data": "{data}", "tasks": ("perplexity",)}, lambda found: [len(each.test) for each in found.splits]
    ),
    "task_settings": Effect(
        TaskSettings(metric="rouge2"), {"data": "{data}"}, lambda found: [each.task.metric for each in found.splits]
    ),
    "effort": Effect("quick", {"data": "{data}"}, lambda found: found.kept_layers.texts),
    "prune": Effect(True, {"data": "{data}"}, lambda found: found.prunes),
    "bits": Effect((2, 8), {}, lambda found: found.specs),
    "group_sizes": Effect((64,), {}, lambda found: found.specs),
    "quantizer": Effect("rtn", {}, lambda found: found.plain_plan().quantizer),
    "dense_bits": Effect(4, {}, lambda found: found.dense_formats()),
    "fallback_bits": Effect(2, {}, lambda found: found.required_specs()),
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Items of two tasks: sums, which fit the fields better, and plain text. One exceeds the context."""
    folder = save_problems(tmp_path_factory.mktemp("problems") / "data", train=8)
    for path in folder.iterdir():
        count = len(path.read_text().splitlines())
        rows = [{"question": f"{path.stem} {at}?", "answer": f"#### {at}"} for at in range(count)]
        rows.append({"question": f"{path.stem} " + "word " * 200, "answer": "#### 1"})
        path.write_text("".join(json.dumps({**row, "text": row["question"]}) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("field", PREPARED)
def test_a_field_changes_what_is_prepared(model: Path, problems: Path, tmp_path: Path, field: str) -> None:
    value, others, seen = PREPARED[field]

    def shown(**options: Any) -> Any:
        named = {name: str(problems) if given == "{data}" else given for name, given in {**others, **options}.items()}
        return seen(prepare(make_request(model, tmp_path / "out", "bits_per_weight", 9, quick=False, **named)))

    assert shown() == shown() != shown(**{field: value})


# Options of a uniform target, without a search.
UNIFORM: dict[str, Effect] = {
    "symmetric": Effect(True, {}, lambda result: set(result.plan.units.values())),
    "fallback_bits": Effect(2, {}, lambda result: len(result.plan.low_units)),
    "dense_bits": Effect(4, {}, lambda result: set(result.plan.dense.values())),
    "group_sizes": Effect((32,), {"symmetric": False}, lambda result: set(result.plan.units.values())),
    "quantizer": Effect("quanto", {}, lambda result: result.plan.quantizer),
}


@pytest.mark.parametrize("field", UNIFORM)
def test_a_field_changes_a_uniform_plan(model: Path, tmp_path: Path, field: str) -> None:
    value, others, seen = UNIFORM[field]

    def shown(**options: Any) -> Any:
        return seen(compile_tiny(model, tmp_path / "out", "uniform", 4, plan_only=True, **others, **options))

    assert shown() != shown(**{field: value})


@pytest.fixture(scope="module")
def watched(
    model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CompileResult, dict[str, dict[str, Any]]]:
    """Run a whole compile, and return the arguments of its stages."""
    seen: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, place in WATCHED.items():
            stage = getattr(place, name)

            def noted(*arguments: Any, stage: Callable[..., Any] = stage, name: str = name, **named: Any) -> Any:
                seen[name] = inspect.signature(stage).bind(*arguments, **named).arguments
                return stage(*arguments, **named)

            patch.setattr(place, name, noted)
        asked = {"objective": "size", "seed": 7, "swaps": 3, "confidence": 0.9, "sensitivity": "fisher"}
        data = {"data": str(texts), "tasks": ("perplexity",)}
        result = compile_tiny(model, tmp_path_factory.mktemp("watched") / "out", "loss", 0.3, **data, **asked)
    return result, seen


Watched = tuple[CompileResult, dict[str, dict[str, Any]]]
STAGES: dict[str, Callable[[CompileResult, dict[str, dict[str, Any]]], bool]] = {
    "target": lambda result, seen: (
        (seen["candidates"]["target"].kind, seen["candidates"]["target"].value) == ("loss", 0.3)
    ),
    "objective": lambda result, seen: seen["choose_objective"]["requested"] == "size",
    "seed": lambda result, seen: {seen[name]["seed"] for name in ("choose_texts", "Sweep", "run")} == {7},
    "swaps": lambda result, seen: seen["candidates"]["swaps"].measurements == 3,
    "confidence": lambda result, seen: seen["certify_task"]["confidence"] == 0.9 and seen["certify_task"]["is_early"],
    "comparisons": lambda result, seen: "compare_with_baselines" not in seen,
}


@pytest.mark.parametrize("field", STAGES)
def test_a_field_arrives_at_its_stages(watched: Watched, field: str) -> None:
    assert STAGES[field](*watched)


# Whole compiles show these.
WHOLE = {
    "sensitivity": ("test_pipeline.py", "test_exact_sensitivity_corrects_each_expert"),
    "search": ("test_pipeline.py", "test_edgemoes_own_search_decides_by_whole_experts"),
    "path_keys": ("calibration/test_path_sets.py", "test_the_form_that_predicts_better_is_kept"),
    "torch_device": ("test_torch_device.py", "test_a_compile_on_another_device_writes_the_same_bytes"),
}


def test_every_field_has_an_effect() -> None:
    shown = {*PREPARED, *UNIFORM, *STAGES, *WHOLE}
    assert shown == {field.name for field in fields(CompileOptions)}
    for file, test in WHOLE.values():
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()
