"""The forecast of what a compile does with the written bundle: learned routers, and the measurement of lossy modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.cli.lossy_modes.mode_sweep import ModesMeasurement
from moec.compiler.forecast import StageForecast, forecast
from moec.compiler.forecast.after_writing import stages_after_writing
from moec.compiler.forecast.rates import DiskRates
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.search.comparison_budget import active_weights
from moec.compiler.walker.memory import all_weights
from moec.manifests.errors import OptionError
from tests.compiler.forecast.test_forecast import NO_DISK, NOTHING
from tests.tiny_compile import make_request, save_model, save_texts

LEARNING, MODES = "learning to look ahead", "measuring lossy modes"
TEXTS = {"train": 10, "validation": 3, "test": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 layers with 4 experts each, and texts of one token per letter."""
    root = tmp_path_factory.mktemp("after")
    save_model(root / "model", layers=3, experts=4)
    save_texts(root / "texts", **TEXTS)
    return root


def prepared(folder: Path, **values: Any) -> Prepared:
    return prepare(make_request(folder / "model", folder / "out", "uniform", 8, data=str(folder / "texts"), **values))


def foreseen(prepared: Prepared, disk: DiskRates = NO_DISK, **rates: float) -> dict[str, StageForecast]:
    """Return the stages if only the named parts take time."""
    found = stages_after_writing(prepared, disk, replace(NOTHING, **rates), 1000, 5, prepared.request.measure_modes)
    return {stage.title: stage for stage in found}


def letters(folder: Path, name: str) -> int:
    text = (folder / "texts" / f"{name}.jsonl").read_text()
    return len(text) - len('{"text": ""}\n') * text.count("\n")


def test_learned_routers_are_counted(folder: Path) -> None:
    found = prepared(folder)
    width, tokens = found.lowering.model.hidden_size + 1, letters(folder, "train")
    (passes,) = foreseen(found, token=1.0).values()
    assert passes.title == LEARNING and passes.seconds == pytest.approx(3 * tokens, rel=0.05)
    assert passes.work.endswith(" tokens once, at most 3 maps") and passes.disk_bytes == 5 and passes.memory_bytes > 0
    # Three penalties: a factor each, and targets and solutions of three maps to 4 experts.
    expected = 3 * (0.8 * tokens * width**2 + width**3 / 2) + 3 * 4 * width * 3 * (0.8 * tokens + width)
    assert foreseen(found, product=1.0)[LEARNING].seconds == pytest.approx(expected, rel=0.05)
    little = replace(found, request=replace(found.request, memory_bytes=1))
    assert foreseen(little, token=1.0)[LEARNING].seconds == pytest.approx(3 * passes.seconds), "layer by layer"


def test_what_learns_nothing_has_no_stage(folder: Path, tmp_path: Path) -> None:
    few = save_texts(tmp_path / "few", **{**TEXTS, "train": 4})
    request = make_request(folder / "model", folder / "out", "uniform", 8, data=str(few))
    assert foreseen(prepare(request), token=1.0) == {}
    one_layer = save_model(tmp_path / "one", layers=1, experts=2)
    request = make_request(one_layer, folder / "out", "uniform", 8, data=str(folder / "texts"))
    assert foreseen(prepare(request), token=1.0) == {}


def test_lossy_modes_are_counted(folder: Path) -> None:
    measured = prepared(folder, measure_modes=ModesMeasurement("big-little gamma=0.5; cache-routing margin=0.2"))
    tokens = letters(folder, "test")
    # Each of 3 settings decodes the texts for a score, and again for a KL, with an end token. They have no prompts.
    decoded = 3 * (2 * tokens + TEXTS["test"])
    found, model = foreseen(measured, memory_byte=1.0)[MODES], measured.lowering.model
    moved = 1000 * active_weights(model) / all_weights(model)
    assert found.seconds == pytest.approx(decoded * moved, rel=0.05)
    assert found.work == "at most 3 settings on 4 items, token by token"
    disk = replace(NO_DISK, digested_byte=1.0)
    prompts, share = 3 * (4 + 4 + 4), 2 / 4  # top-2 of 4 experts; a quarter of 1,000 bytes is in the cache
    read = 750 * (prompts + share * decoded)
    assert foreseen(measured, disk)[MODES].seconds == pytest.approx(read, rel=0.05)
    longer = read + decoded * (moved - 750 * share)
    assert moved > 750 * share
    assert foreseen(measured, disk, memory_byte=1.0)[MODES].seconds == pytest.approx(longer, rel=0.05)


@pytest.mark.parametrize(("is_asked", "low"), [(False, None), (False, 2), (True, None)])
def test_thresholds_that_nobody_asked_for_are_measured_with_low_versions(
    folder: Path, tmp_path: Path, is_asked: bool, low: int | None
) -> None:
    model = prepared(folder).lowering.model
    work = ModesMeasurement("dynamic-precision", is_asked).work(model, low is not None)
    assert work.settings == (9 if low else 3)
    top_1 = save_model(tmp_path / "top-1", layers=1, experts=2, top_k=1)
    request = make_request(top_1, folder / "out", "uniform", 8, data=str(folder / "texts"))
    refused = prepare(request).lowering.model
    if is_asked:
        with pytest.raises(OptionError, match="this model has no other"):
            ModesMeasurement("dynamic-precision").work(refused, False)
    else:
        assert ModesMeasurement("dynamic-precision", is_asked=False).work(refused, low is not None).settings == 0


def test_the_stages_follow_the_others(folder: Path) -> None:
    options: dict[str, Any] = {"data": str(folder / "texts"), "fallback_bits": 2}
    asked = ModesMeasurement("dynamic-precision", is_asked=False)
    found = forecast(make_request(folder / "model", folder / "out", "uniform", 8, measure_modes=asked, **options))
    assert [stage.title for stage in found][-3:] == ["writing the bundle", LEARNING, MODES]
    assert all(stage.seconds > 0 for stage in found)
