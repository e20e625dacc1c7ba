"""`moec demo`: its second example, which takes seconds. `make demo` runs the first one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moec.cli.commands.compiling import demo
from moec.compiler.request.plan import CompileResult

from .conftest import Invoke

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_with_an_encoder_is_a_row_per_bitwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SECOND_ITEMS", 24)
    header, _, *rows = demo.second_example(EXAMPLES, tmp_path).splitlines()
    assert "24 dialogues" in header
    found = {int(row.split()[0]): float(row.split("iB")[1].split()[0]) for row in rows}
    assert tuple(found) == demo.SECOND_BITS
    assert min(found[16], found[4]) >= 0.95 and found[16] - found[2] >= 0.02, "2 bits cost, as examples/README.md says"
    for bits, row in zip(found, rows, strict=True):
        assert int(row.split()[-1]) > 0, "half of the experts do not hold all that are asked for"
        manifest = json.loads((tmp_path / f"switch-{bits}-bits-moec" / "moec.json").read_text())
        assert manifest["model"]["encoder"] is not None


def test_the_main_result_is_printed_last(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compile takes minutes, so the shipped bundle takes its place. Runtime and evaluation are the real ones."""

    def shipped(example: Path, task: str, loss: str, target_path: Path) -> CompileResult:
        quality = json.loads((EXAMPLES / "bundle" / "quality.json").read_text())
        return CompileResult(Path(shutil.copytree(EXAMPLES / "bundle", target_path)), None, quality)

    monkeypatch.setattr(demo, "compile_to_loss", shipped)
    monkeypatch.setattr(demo, "SECOND_MODEL", "no second example")
    monkeypatch.setattr(demo, "STREAMED_ITEMS", 20)
    result = invoke("demo", "--example", EXAMPLES, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    order = (
        "layer   0",
        "best uniform",
        "room for half",
        "tokens/s",
        "time  ",
        "verdict",
        "supported: on held-out items",
    )
    places = [result.stdout.index(text) for text in order]
    assert places == sorted(places)
    assert result.stdout.splitlines()[-1].startswith("supported: on held-out items the loss is at most 2.00 %")


def test_a_folder_without_a_model_is_refused_before_any_work(invoke: Invoke, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "switch_model", tmp_path / "switch_model")
    result = invoke("demo", "--example", tmp_path)
    assert result.exit_code == 1 and "`model/config.json`" in result.stderr
