"""`moec compile`: help with examples, both outputs, and one sentence and one remedy for each wrong input."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import click
import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

from moec.cli.commands.compiling.compile import compile_command
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
    without = [p.opts for p in compile_command.params if isinstance(p, click.Option) and not p.help]
    assert without == []


def test_defaults_make_a_bundle_beside_the_user(run: Compile, model: Path, tmp_path: Path) -> None:
    result = run(model, "--uniform", "4", "--device", "host")
    assert result.exit_code == 0, result.stderr
    assert names(tmp_path) == {"tiny", "tiny-moec", "tiny-moec.log.json", "tiny-moec.report.html"}
    quality = check_bundle(tmp_path / "tiny-moec")
    assert quality["bits"]["formats"] == {"q4g64": 6}
    assert "whole bits of gate, up and down" in result.stdout and "layer   0  444 444" in result.stdout
    assert result.stdout.splitlines()[-1] == "`--uniform` measures no quality: `moec eval` does"
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


def test_overwrite_and_resume(run: Compile, model: Path, tmp_path: Path) -> None:
    assert run(model, "--uniform", "4", "-o", "out").exit_code == 0
    old = contents(tmp_path / "out")
    assert run(model, "--uniform", "2", "-o", "out", "--overwrite", "--resume").exit_code == 0
    assert contents(tmp_path / "out") != old
    assert check_bundle(tmp_path / "out")["bits"]["formats"] == {"q2g64": 6}


# -- bad input: the checkpoint -----------------------------------------------------------------------------------------


def test_not_a_model_folder(run: Compile, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for name, sentence in (
        ("nowhere", "no folder `nowhere`"),
        ("empty", "no `config.json` in `empty`"),
        ("file", "`file` is a file"),
    ):
        assert sentence in refused(run, name, "--uniform", "4")


def edit_config(model: Path, **values: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


def test_an_unknown_family(run: Compile, model: Path) -> None:
    edit_config(model, model_type="gpt9")
    said = refused(run, model, "--uniform", "4")
    assert "`gpt9` is unknown" in said and "`mixtral`" in said


def test_truncated_weights(run: Compile, model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 3, 0):
        path.write_bytes(whole[:length])
        said = refused(run, model, "--uniform", "4")
        assert "model.safetensors` is damaged or truncated" in said


@pytest.mark.parametrize("target", [("--uniform", "4"), (*KL, "--data", "texts")])
def test_weights_that_are_no_numbers(run: Compile, model: Path, data: Path, target: tuple[str, ...]) -> None:
    tensors = load_file(model / "model.safetensors")
    name = sorted(name for name in tensors if "experts" in name)[0]
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    said = refused(run, model, *target)
    assert f"tensor `{name}`" in said and "NaN or infinite" in said


def test_all_that_is_wrong_with_a_model_in_one_report(run: Compile, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:, :32].contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / "tokenizer.json").unlink()
    result = run(model, "--uniform", "4")
    assert result.exit_code == 1
    for part in ("model.norm.weight", "model.embed_tokens.weight", "tokenizer.json", "3 problems"):
        assert part in result.stderr


# -- bad input: data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "expected JSON lines, found an empty file"),
        ("\n\n", "validation.jsonl"),
        ('{"text": "a"}\n{"text": \n', "validation.jsonl:2`: malformed JSON"),
        ('{"text": "a"}\n{"title": "b"}\n', "validation.jsonl:2`: the field `text` of task `perplexity` is missing"),
        ('{"text": "a"}\n{"text": 5}\n', "validation.jsonl:2`: expected text in `text`, found int"),
        ('["text"]\n', "validation.jsonl:1`"),
        ('{"text": "\\ud800"}\n', "validation.jsonl:1`"),
    ],
)
def test_bad_data_names_file_and_line(run: Compile, model: Path, data: Path, content: str, sentence: str) -> None:
    (data / "validation.jsonl").write_text(content)
    said = refused(run, model, *KL, "--data", data)
    assert sentence in said


def test_data_of_another_task(run: Compile, model: Path, data: Path, place: Path) -> None:
    said = refused(run, model, *KL, "--data", data, "--task", "gsm8k")
    assert "the field `question` of task `gsm8k` is missing" in said and "train.jsonl:1" in said
    assert "task `sums` is not known" in refused(run, model, *KL, "--data", data, "--task", "sums")
    for path in data.glob("*.jsonl"):
        path.rename(path.with_suffix(".text"))
    assert "expected files of splits, found test.text" in refused(run, model, *KL, "--data", data)
    assert "does not exist" in refused(run, model, *KL, "--data", "nothing.jsonl")


# -- bad input: targets and options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "expected exactly one target, found none"),
        (("--loss", "2%", "--kl", "0.1"), "found --loss and --kl"),
        (("--loss", "2", "--data", "texts"), "`--loss 2` is ambiguous"),
        (("--size", "2G"), "`--size 2G` is not a size"),
        (("--kl", "inf", "--data", "texts"), "must be a number above 0"),
        (("--loss", "2%"), "measured on text, and none was given"),
        (("--uniform", "7"), "is not a bitwidth"),
        (("--uniform", "1.6", "--group-size", "32"), "1.6 bits come in groups of a multiple of 64 columns"),
        (("--kl", "0.1", "--data", "texts", "--bits", "1.5"), "is not a list of numbers"),
        (("--uniform", "4", "--threads", "0"), "`--threads` is 0, expected 1 to 256"),
        (("--uniform", "4", "--threads", "2", "--cluster", "auto"), "`--threads` is of this machine"),
        (("--uniform", "4", "--data", "texts", "--swaps", "2"), "`--swaps` has no effect with `--uniform`"),
        (("--uniform", "4", "--limit", "2"), "`--limit` has no effect without `--data`"),
        (("--uniform", "4", "--group-size", "48"), "--group-size 48"),
        (("--uniform", "4", "--bits", "2,3"), "`--bits` has no effect"),
        (("--kl", "0.1", "--data", "texts", "--bits", "²"), "is not a list of numbers"),
        (("--kl", "0.1", "--data", "texts", "--bits", ""), "is not a list of numbers"),
        (("--kl", "0.1", "--data", "texts", "--bits", "7"), "--bits"),
        (("--kl", "0.1", "--data", "texts", "--limit", "0"), "limit"),
        (("--kl", "0.1", "--data", "texts", "--shots", "2"), "shots"),
        (("--uniform", "4", "--device", "toaster"), "no device profile is called `toaster`"),
        (("--uniform", "4", "--group-size", "96"), "does not divide the 64 columns"),
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


def test_a_baseline_of_zero_names_the_other_targets(run: Compile, model: Path, place: Path) -> None:
    said = refused(run, model, "--loss", "2%", "--data", place / "problems", *SMALL)
    assert "the baseline scores 0" in said and "`--kl`" in said and "`--size`" in said


def test_a_device_that_is_too_small(run: Compile, model: Path, tmp_path: Path) -> None:
    profile = (shipped_profiles() / "raspberry-pi-4b-sd.toml").read_text()
    small = profile.replace("= 1_500_000_000", "= 1_000_000").replace('"raspberry-pi-4b-sd"', '"thimble"')
    (tmp_path / "thimble.toml").write_text(small)
    said = refused(run, model, "--bits-per-weight", "4", "--device", tmp_path / "thimble.toml")
    assert "`thimble` has a memory budget of" in said


def shipped_profiles() -> Path:
    """Folder of the shipped profiles."""
    import moec.profiles.device

    return Path(moec.profiles.device.__file__).parent


# -- bad input: the disk -----------------------------------------------------------------------------------------------


def test_an_output_that_exists_is_left_alone(run: Compile, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").write_text("mine")
    assert "`out` exists" in refused(run, model, "--uniform", "4", "-o", "out")
    assert "`out` is not a bundle" in refused(run, model, "--uniform", "4", "-o", "out", "--overwrite")


def test_folders_of_the_output_are_made(run: Compile, model: Path, tmp_path: Path) -> None:
    result = run(model, "--uniform", "4", "-o", "no/such/place/out")
    assert result.exit_code == 0, result.stderr
    check_bundle(tmp_path / "no" / "such" / "place" / "out")


def test_no_folder_to_write_into(run: Compile, model: Path) -> None:
    said = refused(run, model, "--uniform", "4", "-o", "tiny/config.json/out")
    assert "`tiny/config.json/out` cannot be written: `tiny/config.json` is not a folder" in said
    refused(run, model, "--uniform", "7", "-o", "made/for/nothing/out")


def test_too_little_space_is_known_before_writing(run: Compile, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    said = refused(run, model, "--uniform", "4", "-o", "out", exit_code=75)
    assert "has 1000 B free, " in said


@pytest.mark.parametrize("file", ["dense", "experts", "moec.json", "quality.json"])
def test_a_disk_that_fills_up(run: Compile, model: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    plain = Disk.write

    def write(self: Disk, stream: BinaryIO, content: bytes | memoryview) -> None:
        if Path(stream.name).name.startswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(self, stream, content)

    monkeypatch.setattr(Disk, "write", write)
    said = refused(run, model, "--uniform", "4", "-o", "out", exit_code=75)
    assert "the disk of" in said and "is full" in said


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
