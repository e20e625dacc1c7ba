"""One format for all experts: its plan, its bundle, and with data the statistics and matrices of a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.compiler.request.options import Talk
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.errors import PlanError
from moec.manifests.quant import QuantSpec
from moec.runtime.bundle.open_bundle import open_bundle
from tests.compiler.lowered import lowered
from tests.tiny_compile import check_bundle, compile_tiny, contents, names, save_model
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.usefixtures("one_thread")


def test_uniform_plans(tmp_path: Path) -> None:
    model = lowered(save_tiny_mixtral(tmp_path / "tiny")).model
    plan = uniform_plan(model, QuantSpec(3, 32), QuantSpec(8, 32), "bfloat16")
    assert plan.bits_per_weight == 3 + 32 / 32
    assert {str(spec) for spec in plan.units.values()} == {"q3g32"}
    formats = {name: str(spec) for name, spec in plan.dense.items()}
    assert (formats["embedding"], formats["layers.1.router"], formats["final_norm"]) == ("q8g32", "bf16", "bf16")
    with pytest.raises(PlanError, match="format q4g64 cannot hold expert matrices of 96 columns"):
        uniform_plan(model, QuantSpec(4, 64), QuantSpec(8, 64), "bfloat16")
    odd = lowered(save_tiny_mixtral(tmp_path / "odd", TinyMixtral(heads=3, kv_heads=1, head_size=32))).model
    dense = uniform_plan(odd, QuantSpec(4), QuantSpec(4), "float16").dense
    assert str(dense["layers.0.output"]) == "q4"
    dense = uniform_plan(odd, QuantSpec(16, float_type="float16"), QuantSpec(8, 64), "float16").dense
    assert (str(dense["layers.0.query"]), str(dense["layers.0.output"])) == ("q8g64", "q8")
    narrow = lowered(save_tiny_mixtral(tmp_path / "narrow", TinyMixtral(width=40))).model
    with pytest.raises(PlanError, match="use --uniform 16"):
        uniform_plan(narrow, QuantSpec(4), QuantSpec(8), "bfloat16")
    plan = uniform_plan(narrow, QuantSpec(16, float_type="bfloat16"), QuantSpec(8), "bfloat16")
    assert {str(spec) for spec in plan.units.values()} == {"bf16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("uniform") / "tiny", layers=2, experts=4)


@pytest.mark.parametrize("bits", [2, 16])
def test_statistics_are_those_of_a_search(bits: float, model: Path, texts: Path, tmp_path: Path) -> None:
    searched = compile_tiny(model, tmp_path / "searched", "bits_per_weight", 9, data=str(texts))
    uniform = compile_tiny(model, tmp_path / "uniform", "uniform", bits, data=str(texts))
    check_bundle(tmp_path / "uniform")
    for name in ("calibration", "statistics"):
        found = [json.loads((tmp_path / folder / "quality.json").read_text()).get(name) for folder in names(tmp_path)]
        assert found[0] == found[1]
    tables = [open_bundle(tmp_path / name).tables() for name in ("searched", "uniform")]
    assert tables[0].popularity.sum() > 0 and np.array_equal(tables[0].popularity, tables[1].popularity)
    assert open_bundle(tmp_path / "uniform").manifest.calibration is not None
    assert searched.plan.quantizer == uniform.plan.quantizer == "gptq"


def test_matrices_depend_on_the_inputs(model: Path, texts: Path, tmp_path: Path) -> None:
    for name, options in (
        ("with", {"data": str(texts)}),
        ("without", {}),
        ("rtn", {"data": str(texts), "quantizer": "rtn"}),
    ):
        compile_tiny(model, tmp_path / name, "uniform", 2, **options)
    experts = [contents(tmp_path / name)["experts-00000.safetensors"] for name in ("with", "without", "rtn")]
    assert experts[0] != experts[1] and len(experts[0]) == len(experts[1]) and experts[1] == experts[2]


@pytest.mark.parametrize("layout", [None, "gptq-v2"])
def test_a_killed_run_continues(
    layout: str | None, model: Path, texts: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The second checkpoint has codes of its own, which the bundle keeps."""
    source = request.getfixturevalue("quantized")(layout) if layout else model
    compile_tiny(source, tmp_path / "whole", "uniform", 4, data=str(texts))

    class Killed(BaseException):
        pass

    def stop(title: str):  # type: ignore[no-untyped-def]
        def report(done: int, total: int) -> None:
            if title == "calibrating and quantizing" and done == 1:
                raise Killed

        return report

    with pytest.raises(Killed):
        compile_tiny(source, tmp_path / "out", "uniform", 4, data=str(texts), talk=Talk(progress=stop))
    assert names(tmp_path) == {"whole", "out.work"}
    notes: list[str] = []
    options: dict[str, Any] = {"data": str(texts), "resume": True, "talk": Talk(notes.append)}
    result = compile_tiny(source, tmp_path / "out", "uniform", 4, **options)
    assert not layout or result.quality["own_codes"]["held"] == 24
    assert any(note.startswith("no path table: it needs three routed layers") for note in notes)
    assert any("taking up" in note for note in notes) and contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_uniform_needs_no_data(model: Path, tmp_path: Path) -> None:
    result = compile_tiny(model, tmp_path / "out", "uniform", 3)
    quality = check_bundle(tmp_path / "out")
    assert set(quality["bits"]["formats"]) == {"q3g64"} and quality["comparison"] is None
    assert open_bundle(tmp_path / "out").manifest.options["quantizer"] == "rtn"
    assert {str(spec) for spec in result.plan.dense.values()} == {"q8g64", "bf16"}
    other = compile_tiny(model, tmp_path / "other", "uniform", 4, quantizer="quanto", dense_bits=16)
    assert other.plan.quantizer == "quanto"
    check_bundle(tmp_path / "other")
    rows = compile_tiny(model, tmp_path / "rows", "uniform", 8, quantizer="quanto", plan_only=True)
    assert {str(spec) for spec in rows.plan.units.values()} == {"q8"}, "one scale for each row"


def test_groups_of_32_at_4_bits_take_the_bytes_of_q4_0(model: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "uniform", 4, group_sizes=(32,), dense_bits=4)
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest.cost.expert_bits_per_weight == 4.5 and manifest.options["symmetric"] == "true"
    assert {str(entry.gate) for entry in manifest.experts} == {"q4g32s"}
    assert {str(entry.spec) for entry in manifest.dense if entry.name == "embedding"} == {"q4g32s"}
