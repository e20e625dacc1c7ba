"""`moec compile`: help with examples, both outputs, and one sentence and one remedy for each wrong input."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

import pytest
from click.testing import Result

from moec.compiler.workspace.durable import Disk
from tests.tiny_compile import check_bundle, contents, names, save_model, save_problems, save_texts

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
Compile = Callable[..., Result]
PI = ("--device", "raspberry-pi-4b-sd")
KL = ("--kl", "0.05")
# A small search: one format below 16 bits.
SMALL = ("--bits", "2,16", "--group-size", "32", "--dense-bits", "8", "--no-comparisons")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `tiny` and the data `texts` and `problems`."""
    folder = tmp_path_factory.mktemp("compile")
    save_model(folder / "tiny", layers=1, experts=2)
    save_texts(folder / "texts", train=4, validation=4, test=6)
    save_problems(folder / "problems")
    return folder


@pytest.fixture
def model(place: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(place / "tiny", tmp_path / "tiny"))


@pytest.fixture
def data(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "texts", tmp_path / "texts"))


@pytest.fixture
def run(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Return a function that runs `moec compile` in the folder of the test, for a named device by default."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        device = () if "--device" in arguments else PI
        return invoke("compile", *arguments, *device)

    return call


def refused(run: Compile, *arguments: object, exit_code: int = 1) -> str:
    """Check that a compile is refused, and return its sentence.

    Stderr has one sentence and one hint. Stdout is empty, and the disk is unchanged.
    """
    here = Path.cwd()
    before = contents(here), names(here)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    (hint,) = [line for line in lines if line.startswith("hint: ")]
    assert len(hint) > len("hint: ") + 5
    assert (contents(here), names(here)) == before
    return error + "\n" + hint


# -- what it does ------------------------------------------------------------------------------------------------------


def test_help_teaches(invoke: Invoke) -> None:
    result = invoke("compile", "--help")
    assert result.exit_code == 0 and result.stderr == ""
    for word in ("--loss", "--kl", "--bits-per-weight", "--size", "--uniform", "exactly one target", "2.1GiB"):
        assert word in result.stdout
    assert result.stdout.count("moec compile mixtral") == 5, "examples say more than a list of options"


def test_defaults_make_a_bundle_beside_the_user(run: Compile, model: Path, tmp_path: Path) -> None:
    result = run(model, "--uniform", "4", "--device", "host")
    assert result.exit_code == 0, result.stderr
    assert names(tmp_path) == {"tiny", "tiny-moec", "tiny-moec.log.json", "tiny-moec.report.html"}
    quality = check_bundle(tmp_path / "tiny-moec")
    assert quality["bits"]["formats"] == {"q4g64": 6}
    assert "whole bits of gate, up and down" in result.stdout and "layer   0  444 444" in result.stdout
    assert result.stdout.splitlines()[-1] == "no quality was measured: `moec eval` does"
    log = json.loads((tmp_path / "tiny-moec.log.json").read_text())
    assert log["events"][-1]["event"] == "done" and log["events"][-1]["seconds"] >= 0
    writing = next(stage for stage in log["stages"] if stage["title"] == "writing the bundle")
    assert writing["seconds"] >= 0 and writing["peak_memory_bytes"] > 50 << 20
    on_disk = sum(path.stat().st_size for path in (tmp_path / "tiny-moec").glob("*.safetensors"))
    assert on_disk // 2 < writing["disk_bytes"] <= 2 * on_disk
    assert (tmp_path / "tiny-moec.report.html").read_text().startswith("<!doctype html>")


def test_json_is_the_content_of_quality_json(run: Compile, model: Path, data: Path, tmp_path: Path) -> None:
    result = run(model, *KL, "--data", data, *SMALL, "-o", "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == check_bundle(tmp_path / "out")
    assert "bits per weight: KL" in result.stderr and "upper bound" in result.stderr


def test_the_search_is_told_as_it_goes(run: Compile, model: Path, data: Path) -> None:
    result = run(model, "--loss", "50%", "--data", data, *SMALL, "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert "bits per weight: loss perplexity" in result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith(("supported", "met", "missed", "refuted"))


def test_plan_only_prints_and_writes_nothing(run: Compile, model: Path, data: Path, tmp_path: Path) -> None:
    before = contents(tmp_path), names(tmp_path)
    for target, last in ((KL, "nothing is proven"), (("--loss", "50%"), "nothing is proven")):
        result = run(model, *target, "--data", data, *SMALL, "--plan-only")
        assert result.exit_code == 0, result.stderr
        assert "peak memory so far" in result.stdout and "calibrating" in result.stdout
        assert "whole bits of gate, up and down" in result.stdout and last in result.stdout.splitlines()[-1]
    assert (contents(tmp_path), names(tmp_path)) == before


def test_what_it_will_take_is_said_and_nothing_is_done(run: Compile, model: Path, data: Path, tmp_path: Path) -> None:
    before = contents(tmp_path), names(tmp_path)
    result = run(model, *KL, "--data", data, *SMALL, "--estimate")
    assert result.exit_code == 0, result.stderr
    assert "memory at most" in result.stdout and result.stdout.splitlines()[-1].startswith("in all")
    told = json.loads(run(model, "--loss", "50%", "--data", data, *SMALL, "--estimate", "--json").stdout)["stages"]
    assert {"measuring the tasks", "swapping formats at equal bytes"} <= {stage["title"] for stage in told}
    assert all(stage["seconds"] > 0 for stage in told if stage["title"] != "hashing the checkpoint")
    assert (contents(tmp_path), names(tmp_path)) == before


# -- bad input: the checkpoint -----------------------------------------------------------------------------------------


# -- bad input: data ---------------------------------------------------------------------------------------------------


def test_data_of_another_task(run: Compile, model: Path, data: Path, place: Path) -> None:
    said = refused(run, model, *KL, "--data", data, "--task", "gsm8k")
    assert "the field `question` of task `gsm8k` is missing" in said and "train.jsonl:1" in said
    for path in data.glob("*.jsonl"):
        path.rename(path.with_suffix(".text"))
    assert "expected files of splits, found test.text" in refused(run, model, *KL, "--data", data)


# -- bad input: targets and options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--size", "2G"), "`--size 2G` is not a size"),
        (("--uniform", "1.6", "--group-size", "32"), "1.6 bits come in groups of a multiple of 64 columns"),
        (("--kl", "0.1", "--data", "texts", "--bits", "1.5"), "is not a list of numbers"),
        (("--uniform", "4", "--threads", "0"), "`--threads` is 0, expected 1 to 256"),
        (("--uniform", "4", "--threads", "2", "--cluster", "auto"), "`--threads` is of this machine"),
        (("--kl", "0.1", "--data", "texts", "--bits", "²"), "is not a list of numbers"),
        (("--kl", "0.1", "--data", "texts", "--bits", ""), "is not a list of numbers"),
        (("--uniform", "4", "--group-size", "2147483648"), "is not a list of numbers"),
        (("--uniform", "4", "--group-size", "134217728"), "more than the 16777216 columns"),
        (("--uniform", "4", "--group-size", "3" * 5000), "is not a list of numbers"),
        (("--kl", "0.1", "--data", "texts", "--bits", "4," + "3" * 5000), "is not a list of numbers"),
        (("--kl", "0.1", "--data", "texts", "--seed", "-1"), "`--seed -1` must be from 0"),
        (("--kl", "0.1", "--data", "texts", "--seed", str(2**64)), "must be from 0"),
    ],
)
def test_options_that_cannot_be(
    run: Compile, model: Path, data: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(run, model, *arguments)


def test_an_unreachable_target_prints_the_best_that_can_be_had(run: Compile, model: Path, data: Path) -> None:
    said = refused(run, model, "--kl", "0.0001", "--data", data, "--bits", "2", *SMALL[2:])
    assert "no plan on offer keeps KL 0.0001" in said and "2.75 bits per weight, has KL 0." in said
    said = refused(run, model, "--loss", "0.001%", "--data", data, "--bits", "2", *SMALL[2:])
    assert "the most precise one, 2.75 bits per weight, measures loss perplexity" in said
    said = refused(run, model, "--size", "1kB")
    assert "1000 bytes of routed experts cannot be had" in said and "can" in said


# -- bad input: the disk -----------------------------------------------------------------------------------------------


def test_too_little_space_is_known_before_writing(run: Compile, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    said = refused(run, model, "--uniform", "4", "-o", "out", exit_code=75)
    assert "has 1000 B free, " in said


def test_a_full_disk_during_the_search_keeps_what_was_measured(
    run: Compile, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Disk.write

    def write(self: Disk, stream: BinaryIO, content: bytes | memoryview) -> None:
        if Path(stream.name).name.startswith("experts"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(self, stream, content)

    arguments = (model, *KL, "--data", data, *SMALL, "-o", "out")
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "write", write)
        result = run(*arguments)
    assert result.exit_code == 75 and "is full" in result.stderr
    assert names(tmp_path) == {"tiny", "texts", "out.work"}, "no part of a bundle, and the measurements"
    result = run(*arguments, "--resume")
    assert result.exit_code == 0, result.stderr
    assert names(tmp_path) == {"tiny", "texts", "out", "out.log.json", "out.report.html"}
    check_bundle(tmp_path / "out")


def test_a_picture_that_cannot_be_written_is_known_before_the_work(run: Compile, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.report.html").mkdir()
    assert "`out.report.html` is a folder" in refused(run, model, "--uniform", "4", "-o", "out")


@pytest.mark.parametrize("name", ["out.report.html", "out.log.json", "out-laptop.report.html", "out-laptop.log.json"])
def test_a_file_of_somebody_else_is_refused_before_the_work(
    run: Compile, model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    devices = ("--device", "raspberry-pi-4b-sd,laptop") if "laptop" in name else ()
    told = refused(run, model, "--uniform", "4", "-o", "out", *devices)
    assert f"`{name}` was not written by moec, so it is not replaced" in told
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["out.partial", "out.work"])
def test_the_name_of_an_unfinished_compile_is_no_output(run: Compile, model: Path, tmp_path: Path, name: str) -> None:
    result = run(model, "--uniform", "4", "-o", name)
    assert result.exit_code == 2 and f"`{name}` ends in" in result.stderr
    assert names(tmp_path) == {"tiny"}


def test_a_sweep_prints_a_table_and_keeps_a_curve(run: Compile, model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("--data", data, "--task", "perplexity", "-o", "out", *SMALL)
    result = run(model, "--sweep", "20%,80%", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "20.00 %" in result.stdout and "80.00 %" in result.stdout and "out.curve.json" in result.stdout
    curve = json.loads((tmp_path / "out.curve.json").read_text())["curve"]
    assert [point["target"] for point in curve] == [0.2, 0.8] and not (tmp_path / "out").exists()
    picture = (tmp_path / "out.curve.svg").read_text()
    assert "moec: 20.00 %" in picture and ElementTree.fromstring(picture).tag.endswith("svg")
    again = run(model, "--sweep", "20%,80%", *arguments, "--json")
    assert json.loads(again.stdout)["curve"] == curve
    refused = run(model, "--sweep", "20%", "--loss", "2%", *arguments)
    assert refused.exit_code == 1 and "`--sweep` and `--loss` both name losses" in refused.stderr
