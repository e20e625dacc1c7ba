"""`moec export-plan`: a file for another engine, and the measured cost of its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.model import ExpertKey
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import contents, names, save_texts

from .conftest import Invoke
from .finished_compile import PI, SMALL, bundle, place

__all__ = ["bundle", "place"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread")
ENGINES = ("llama.cpp", "mlx", "gptqmodel")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_is_written_without_a_measurement(bundle: Path, tmp_path: Path, invoke: Invoke, engine: str) -> None:
    before = contents(bundle)
    result = invoke("export-plan", bundle, "--for", engine, "-o", tmp_path / "new" / "plan.py")
    assert result.exit_code == 0, result.stderr
    assert "layer  gate" in result.stdout and "bits per weight" in result.stdout and "KL" not in result.stdout
    assert "is not measured: add `--model` and `--data`" in result.stderr and "wrote `" in result.stderr
    assert (tmp_path / "new" / "plan.py").stat().st_size > 0 and contents(bundle) == before
    told = invoke("export-plan", bundle, "--for", engine, "-o", tmp_path / "again", "--json")
    facts: dict[str, Any] = json.loads(told.stdout)
    assert facts["measured"] is None and facts["engine"] == engine and facts["file"] == str(tmp_path / "again")
    if engine != "mlx":  # whose file names itself
        assert (tmp_path / "again").read_bytes() == (tmp_path / "new" / "plan.py").read_bytes()


@pytest.mark.parametrize("engine", ["llama.cpp", "gptqmodel"])
def test_the_cost_is_measured_next_to_the_bundle(
    place: Path, bundle: Path, tmp_path: Path, invoke: Invoke, engine: str
) -> None:
    """The KL of the bundle is that of its own compile, and the checkpoint comes from the log."""
    before = contents(bundle)
    arguments = ("export-plan", bundle, "--for", engine, "-o", tmp_path / "plan", "--data", place / "texts")
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    measured = facts["measured"]
    quality = json.loads((bundle / "quality.json").read_bytes())
    of_compile = [
        trial["kl"]["mean"]
        for trial in quality["trials"]
        if trial["kl"] is not None and trial["expert_packed_bytes"] == facts["bundle_expert_bytes"]
    ]
    assert measured["bundle"]["kl"]["mean"] in of_compile
    assert measured["plan"]["kl"]["mean"] == min(measured["tried"].values()) > 0
    assert len(measured["tried"]) == (1 if engine == "gptqmodel" else 2) and measured["items"] == 4
    assert contents(bundle) == before and names(tmp_path) == {"out", "out.log.json", "out.report.html", "plan"}


def test_the_tables_have_both_costs(place: Path, bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    result = invoke("export-plan", bundle, "--for", "mlx", "-o", tmp_path / "plan.py", "--model", place / "tiny")
    assert result.exit_code == 0, result.stderr
    assert "plan for mlx" in result.stdout and "The quantizer of mlx differs" in result.stdout
    assert "by the bits of the bundle" in result.stdout and "by predicted losses" in result.stdout
    assert "not measured" not in result.stderr


def test_a_loss_is_measured_on_answers(place: Path, tmp_path: Path, invoke: Invoke) -> None:
    loss = ("--loss", "50%", *SMALL[2:], *PI, "--no-comparisons", "-o", tmp_path / "out")
    assert invoke("compile", place / "tiny", "--data", place / "texts", *loss).exit_code == 0
    arguments = ("--for", "gptqmodel", "-o", tmp_path / "plan", "--model", place / "tiny", "--json")
    result = invoke("export-plan", tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.stderr
    measured = json.loads(result.stdout)["measured"]
    for which in ("bundle", "plan"):
        (estimate,) = measured[which]["losses"].values()
        assert estimate["n"] == 4


def test_an_interrupted_measurement_is_taken_up(
    bundle: Path, place: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halt(*arguments: object) -> None:
        raise KeyboardInterrupt

    arguments = ("export-plan", bundle, "--for", "mlx", "-o", tmp_path / "plan.py", "--data", place / "texts")
    with monkeypatch.context() as patched:
        patched.setattr("moec.compiler.export.plan_cost._least_kl", halt)
        result = invoke(*arguments)
        assert result.exit_code != 0 and "the same command with `--resume` continues" in result.stderr
    assert "out.plan-cost.work" in names(tmp_path) and "plan.py" not in names(tmp_path)
    result = invoke(*arguments, "--resume")
    assert result.exit_code == 0 and "taking up" in result.stderr, result.stderr
    assert names(tmp_path) == {"out", "out.log.json", "out.report.html", "plan.py"}


def test_bad_input_is_refused_and_leaves_nothing(place: Path, bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "full").write_text("mine")
    before = names(tmp_path)
    start = ("export-plan", bundle, "--for", "mlx")
    other = save_texts(place / "more", train=5, validation=4, test=6)
    for arguments, code, sentence in (
        (("export-plan", bundle, "--for", "ollama", "-o", tmp_path / "x"), 2, "'ollama' is not one of"),
        (("export-plan", bundle, "-o", tmp_path / "x"), 2, "Missing option '--for'"),
        (("export-plan", tmp_path / "nowhere", "--for", "mlx", "-o", tmp_path / "x"), 1, "does not exist"),
        (("export-plan", tmp_path, "--for", "mlx", "-o", tmp_path / "x"), 1, "`moec.json` is missing"),
        ((*start, "-o", tmp_path / "full"), 1, "`exists"),
        ((*start, "-o", "-"), 1, "standard output"),
        ((*start, "-o", tmp_path / "x", "--resume"), 1, "`--resume` has no effect without a measurement"),
        ((*start, "-o", tmp_path / "x", "--memory", "1GiB"), 1, "`--memory` has no effect without a measurement"),
        ((*start, "-o", tmp_path / "x", "--data", other), 1, "is not the data that"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == code and sentence in result.stderr.replace("full` exists", "`exists"), result.stderr
        assert names(tmp_path) == before
    assert (tmp_path / "full").read_text() == "mine"


def test_bundles_that_cannot_be_measured_have_a_plan_without_a_cost(
    place: Path, bundle: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("compile", place / "tiny", "--uniform", "4", *PI, "-o", tmp_path / "flat").exit_code == 0
    data = ("--model", place / "tiny", "--data", place / "texts")
    result = invoke("export-plan", tmp_path / "flat", "--for", "mlx", "-o", tmp_path / "plan", *data)
    assert result.exit_code == 1 and "one format by request" in result.stderr
    assert not (tmp_path / "plan").exists()
    result = invoke("export-plan", tmp_path / "flat", "--for", "mlx", "-o", tmp_path / "plan")
    assert result.exit_code == 0 and "4g64" in result.stdout
    monkeypatch.setattr("moec.compiler.export.plan_cost.PACKAGES", ("gptq",))
    result = invoke("export-plan", bundle, "--for", "mlx", "-o", tmp_path / "other", *data)
    assert result.exit_code == 1 and "was quantized by gptq" in result.stderr and not (tmp_path / "other").exists()


def test_experts_that_are_left_out_are_told(checkpoint: Path, tmp_path: Path, invoke: Invoke) -> None:
    bundle = emit_bundle(checkpoint, tmp_path / "pruned", bitwidth=4, pruned=[ExpertKey(0, 1), ExpertKey(2, 3)])
    result = invoke("export-plan", bundle, "--for", "llama.cpp", "-o", tmp_path / "types.txt")
    assert result.exit_code == 0 and "2 experts that the bundle leaves out are kept" in result.stderr
