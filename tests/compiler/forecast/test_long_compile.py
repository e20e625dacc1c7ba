"""The forecast at the start of a long compile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moec.compiler import forecast as forecasts
from moec.compiler.forecast import StageForecast, long_compile
from moec.compiler.forecast.long_compile import shorter_option
from moec.compiler.preflight.preparation import prepare
from moec.compiler.request.options import Talk
from moec.compiler.stages import planning
from tests.tiny_compile import compile_tiny, contents, make_request, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 4), "group_sizes": (32,), "dense_bits": 8}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every model is large, and every compile long. Returns a list that grows with each measurement of a layer."""
    timed, measure_layer = list[int](), forecasts.measure_layer
    monkeypatch.setattr(long_compile, "is_large", lambda model: True)
    monkeypatch.setattr(long_compile, "LONG_S", 0.0)
    monkeypatch.setattr(forecasts, "measure_layer", lambda *values: timed.append(1) or measure_layer(*values))
    return timed


class Halt(Exception):
    """A fault of the machine."""


def halt(*_: object) -> Any:
    raise Halt


def test_a_forecast_changes_nothing_and_is_made_once(
    large: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    stages = list[Any]()
    options = {**OPTIONS, "data": str(texts), "talk": Talk(forecast=lambda *values: stages.append(values))}
    with monkeypatch.context() as patched, pytest.raises(Halt):
        patched.setattr(planning, "candidates", halt)
        compile_tiny(model, tmp_path / "out", "kl", 0.05, **options)
    assert len(stages) == len(large) == 1
    compile_tiny(model, tmp_path / "out", "kl", 0.05, resume=True, **options)
    assert stages[1] == stages[0] and len(large) == 1
    assert {"calibrating and quantizing", "KL on perplexity"} < {stage["title"] for stage in stages[0][0]}
    monkeypatch.undo()
    compile_tiny(model, tmp_path / "small", "kl", 0.05, **options)
    assert len(stages) == 2 and contents(tmp_path / "small") == contents(tmp_path / "out")


def test_a_short_compile_tells_no_forecast(large: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_compile, "LONG_S", 1e9)
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    compile_tiny(model, tmp_path / "out", "kl", 0.05, data=str(texts), talk=Talk(forecast=halt), **OPTIONS)
    assert large
    compile_tiny(model, tmp_path / "flat", "uniform", 4, data=str(texts), talk=Talk(forecast=halt))


def test_the_option_is_that_of_the_dearest_stages(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", layers=2, experts=3)
    texts = save_texts(tmp_path / "texts", validation=1000, test=2000)
    options = {**OPTIONS, "group_sizes": (32, 64), "data": str(texts), "quick": False}
    prepared = prepare(make_request(model, tmp_path / "out", "loss", 0.05, **options))

    def shorter(others: Sequence[tuple[str, float]] = (), **seconds: float) -> Any:
        titles = {
            "tasks": "measuring the tasks",
            "sweep": "calibrating and quantizing",
            "writing": "writing the bundle",
        }
        stages = [StageForecast(titles[name], spent, 0, 0, "") for name, spent in seconds.items()]
        return shorter_option(prepared, stages, others)

    # 5 passes over validation and 2 over test items: 9,000 answers. Half of them are left with 642 items of each.
    assert shorter(tasks=1100.0) == ("--limit 600", pytest.approx(1100 * 4200 / 9000))
    assert shorter(tasks=1100.0, sweep=900.0) == ("--limit 100", pytest.approx(900 + 1100 * 700 / 9000))
    option, left = shorter(sweep=1000.0, writing=10.0)
    assert option == "--group-size 64" and 300 < left < 700
    assert shorter(writing=1000.0, tasks=10.0) is None
    assert shorter([("--effort quick", 300.0)], writing=1000.0, tasks=10.0) == ("--effort quick", 300.0)
    assert shorter([("--effort quick", 300.0)], tasks=1100.0)[0] == "--limit 600", "nearer to half"
