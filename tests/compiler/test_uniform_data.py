"""A uniform target with data: statistics as a search counts them, and matrices that GPTQ made from the inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.request.options import Talk
from moec.runtime.bundle.open_bundle import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, contents, make_request, names, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_killed_run_continues(model: Path, texts: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "whole", "uniform", 3, data=str(texts))

    class Killed(BaseException):
        pass

    def stop(title: str):  # type: ignore[no-untyped-def]
        def report(done: int, total: int) -> None:
            if title == "calibrating and quantizing" and done == 1:
                raise Killed

        return report

    with pytest.raises(Killed):
        compile_tiny(model, tmp_path / "out", "uniform", 3, data=str(texts), talk=Talk(progress=stop))
    assert names(tmp_path) == {"whole", "out.work"}
    notes: list[str] = []
    request = make_request(model, tmp_path / "out", "uniform", 3, data=str(texts), resume=True, talk=Talk(notes.append))
    compile_checkpoint(request)
    assert any(note.startswith("no path table: it needs three routed layers") for note in notes)
    assert any("taking up" in note for note in notes) and contents(tmp_path / "out") == contents(tmp_path / "whole")
