"""Measurements after a finished compile: `moec compare` and `moec export-plan`. The bundle does not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moec.manifests.model import ExpertKey
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import check_bundle, contents, little_memory, names, save_model, save_texts

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--kl", "0.05", "--bits", "2,4,16", "--group-size", "32", "--dense-bits", "8", "--swaps", "0")
PI = ("--device", "raspberry-pi-4b-sd")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and texts."""
    folder = tmp_path_factory.mktemp("finished")
    save_model(folder / "tiny", layers=1, experts=2)
    save_texts(folder / "texts", train=4, validation=4, test=6)
    return folder


@pytest.fixture
def bundle(place: Path, tmp_path: Path, invoke: Invoke) -> Path:
    """A bundle that was compiled without comparisons, with its log next to it."""
    made = place / "out"
    if not made.exists():
        data = ("--data", place / "texts")
        result = invoke("compile", place / "tiny", *data, *SMALL, *PI, "--no-comparisons", "-o", made)
        assert result.exit_code == 0, result.stderr
    for path in place.glob("out.*"):
        shutil.copy(path, tmp_path / path.name)
    return Path(shutil.copytree(made, tmp_path / "out"))


def test_a_comparison_finds_what_a_compile_with_comparisons_finds(
    place: Path, bundle: Path, tmp_path: Path, invoke: Invoke
) -> None:
    before = contents(bundle)
    result = invoke("compare", bundle)
    assert result.exit_code == 0, result.stderr
    assert "best uniform" in result.stdout and "EdgeMoE with our quantizer" in result.stdout
    assert contents(bundle) == before
    log_and_picture = {"out.log.json", "out.report.html"}
    assert names(tmp_path) == {"out", "out.comparison.json", *log_and_picture}
    found = json.loads((tmp_path / "out.comparison.json").read_text())
    whole = tmp_path / "whole"
    arguments = ("compile", place / "tiny", "--data", place / "texts", *SMALL, *PI, "--comparisons", "-o", whole)
    assert invoke(*arguments).exit_code == 0
    quality = check_bundle(whole)
    assert found["comparison"] == quality["comparison"] and len(found["comparison"]["baselines"]) == 3
    told = invoke("compare", whole, "--json")
    assert told.exit_code == 0 and "holds all comparisons already" in told.stderr
    assert json.loads(told.stdout) == quality["comparison"]


def test_a_comparison_with_little_memory_finds_the_same(
    bundle: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few short texts. Longer ones would be cut where memory does not hold the model."""
    found = []
    for patched in (False, True):
        if patched:
            little_memory(monkeypatch.setattr)
        result = invoke("compare", bundle, "--json")
        assert result.exit_code == 0, result.stderr
        found.append(json.loads(result.stdout))
        (tmp_path / "out.comparison.json").unlink()
    assert found[0] == found[1] and len(found[0]["baselines"]) == 3


def test_kept_measurements_of_the_compile_are_not_made_again(
    place: Path, bundle: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with losses from gradients, experts left out, and low versions: they change what is quantized."""
    kept = tmp_path / "kept"
    given = ("--data", place / "texts", *SMALL, *PI, "--fallback-bits", "1", "--measurements", kept)
    made = invoke("compile", place / "tiny", *given, "--no-comparisons", "-o", tmp_path / "new")
    assert made.exit_code == 0, made.stderr
    before = names(kept)
    expected = invoke("compare", bundle, "--json")
    with monkeypatch.context() as patched:
        quantize = "moec.compiler.stages.sweep.LayerQuantizer.run"
        patched.setattr(quantize, lambda *_: pytest.fail("units are quantized again"))
        result = invoke("compare", tmp_path / "new", "--measurements", kept, "--json")
    assert result.exit_code == 0, result.stderr
    assert "taking up" in result.stderr and json.loads(result.stdout) == json.loads(expected.stdout)
    added = set(names(kept)) - set(before)
    assert set(before) <= set(names(kept)) and {name.partition("-")[0] for name in added} <= {"kl", "nll", "answers"}
    again = invoke("compile", place / "tiny", *given, "--comparisons", "--overwrite", "-o", tmp_path / "new")
    assert again.exit_code == 0, again.stderr
    assert check_bundle(tmp_path / "new")["comparison"] == json.loads(result.stdout)
    (tmp_path / "file").touch()
    refused = invoke("compare", bundle, "--measurements", tmp_path / "file")
    assert refused.exit_code == 1 and "is a file, expected a folder" in refused.stderr


def test_items_beyond_the_context_are_treated_as_in_the_compile(place: Path, tmp_path: Path, invoke: Invoke) -> None:
    """One item of each split has several hundred tokens, of a context of 128."""
    data = Path(shutil.copytree(place / "texts", tmp_path / "texts"))
    for name in ("validation", "test"):
        (file,) = data.glob(f"{name}.*")
        with file.open("a") as rows:
            rows.write(json.dumps({"text": f"a {name} " + "word small pen " * 200}) + "\n")
    found = {}
    for policy in ("truncate", "skip"):
        given = ("--data", data, *SMALL, *PI, "--long-items", policy)
        whole, bare = tmp_path / f"whole-{policy}", tmp_path / f"bare-{policy}"
        assert invoke("compile", place / "tiny", *given, "--comparisons", "-o", whole).exit_code == 0
        assert invoke("compile", place / "tiny", *given, "--no-comparisons", "-o", bare).exit_code == 0
        result = invoke("compare", bare, "--json")
        assert result.exit_code == 0, result.stderr
        found[policy] = json.loads(result.stdout)
        assert found[policy] == check_bundle(whole)["comparison"]
    assert found["truncate"] != found["skip"]


def test_a_loss_is_compared_on_answers_of_temporary_bundles(place: Path, tmp_path: Path, invoke: Invoke) -> None:
    """What a killed comparison left of them is removed, and a folder that it did not leave is in the way."""
    loss = ("--loss", "50%", *SMALL[2:], *PI, "--no-comparisons", "-o", tmp_path / "out")
    assert invoke("compile", place / "tiny", "--data", place / "texts", *loss).exit_code == 0
    left = tmp_path / "out.comparison.work-trial.partial"
    left.mkdir()
    (left / "letter.txt").write_text("mine")
    result = invoke("compare", tmp_path / "out")
    assert result.exit_code != 0 and "is in the way and was not left by a compile" in result.stderr
    (left / "letter.txt").rename(left / "dense.safetensors")
    result = invoke("compare", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["baselines"]) == 3
    assert names(tmp_path) == {"out", "out.log.json", "out.report.html", "out.comparison.json"}


def test_a_bundle_that_was_moved_says_what_it_needs(place: Path, bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "out.log.json").unlink()
    result = invoke("compare", bundle)
    assert result.exit_code == 1 and "the checkpoint (`--model`) and the task data (`--data`)" in result.stderr
    result = invoke("compare", bundle, "--data", place / "texts")
    assert result.exit_code == 1 and "does not name the checkpoint (`--model`)" in result.stderr
    result = invoke("compare", bundle, "--data", place / "texts", "--model", place / "tiny", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["baselines"]) == 3


def test_another_checkpoint_and_other_data_are_refused(
    place: Path, bundle: Path, tmp_path: Path, invoke: Invoke
) -> None:
    other = Path(shutil.copytree(place / "tiny", tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    result = invoke("compare", bundle, "--model", other)
    assert result.exit_code == 1 and "is not the checkpoint that" in result.stderr
    assert "`model.safetensors` differs" in result.stderr
    for split in ("train", "validation", "test"):
        data = Path(shutil.copytree(place / "texts", tmp_path / split))
        with (data / f"{split}.jsonl").open("a") as file:
            file.write('{"text": "another lamp"}\n')
        result = invoke("compare", bundle, "--data", data)
        assert result.exit_code == 1 and "is not the data that" in result.stderr, split
    result = invoke("compare", bundle, "--memory", "1MiB")
    assert result.exit_code == 1 and "one layer at a time takes" in result.stderr
    assert "out.comparison.json" not in names(tmp_path) and "out.comparison.work" not in names(tmp_path)


def test_an_interrupted_comparison_is_taken_up(
    bundle: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("moec.compiler.search.comparison.importance_list", halt)
        result = invoke("compare", bundle)
        assert result.exit_code != 0
        assert "out.comparison.work`; the same command with `--resume` continues" in result.stderr
    assert "out.comparison.work" in names(tmp_path) and "out.comparison.lock" not in names(tmp_path)
    result = invoke("compare", bundle, "--resume")
    assert result.exit_code == 0 and "taking up" in result.stderr, result.stderr
    assert "out.comparison.json" in names(tmp_path) and "out.comparison.work" not in names(tmp_path)


def test_bundles_without_a_search_have_nothing_to_compare(place: Path, tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("compile", place / "tiny", "--uniform", "4", *PI, "-o", tmp_path / "flat").exit_code == 0
    result = invoke("compare", tmp_path / "flat", "--data", place / "texts")
    assert result.exit_code == 1 and "one format by request" in result.stderr
    sized = ("--bits-per-weight", "4", "--bits", "2,4,16", "--group-size", "32", "--dense-bits", "8")
    assert invoke("compile", place / "tiny", *sized, *PI, "-o", tmp_path / "sized").exit_code == 0
    result = invoke("compare", tmp_path / "sized", "--data", place / "texts")
    assert result.exit_code == 1 and "compiled without data" in result.stderr
    result = invoke("compare", tmp_path / "nowhere")
    assert result.exit_code == 1 and "does not exist, expected a bundle folder" in result.stderr


ENGINES = ("llama.cpp", "mlx", "gptqmodel")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_is_exported_without_a_measurement(bundle: Path, tmp_path: Path, invoke: Invoke, engine: str) -> None:
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
def test_the_cost_of_an_exported_plan_is_measured(
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


def test_a_refused_export_leaves_nothing(place: Path, bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
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
