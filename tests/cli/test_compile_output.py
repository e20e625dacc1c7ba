"""Output of a compile: new folders, one compile at a time, kept measurements, and a run that was cut off at its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moec.cli.commands.compiling import compile as compile_command
from moec.cli.main import cli
from moec.compiler.preflight import finished
from moec.compiler.stages import bundle as bundle_stages
from moec.compiler.workspace import output_lock, work_folder
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.output_lock import hold_output
from moec.manifests.errors import MoecError, OptionError
from tests.tiny_compile import check_bundle, contents, names, save_model, save_texts

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
UNIFORM = ("--uniform", "4", "--device", "raspberry-pi-4b-sd")
# A program that compiles and stops before it writes the bundle. It prints `hold` and waits for a line.
STOPPED = """
import sys
from moec.compiler.stages import bundle as stages
from moec.cli.main import cli
plain = stages.emit
def emit(*arguments, **options):
    print("hold", flush=True)
    sys.stdin.readline()
    return plain(*arguments, **options)
stages.emit = emit
sys.exit(cli.main(args=sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("output") / "tiny", layers=1, experts=2)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a compile in a new process, and return it when it is about to write its bundle."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, "compile", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "hold\n", process.communicate()[1]
    return process


def test_a_second_compile_into_one_output_is_refused(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = start(model, *UNIFORM, "-o", out)
    for more in ((), ("--overwrite",), ("--resume",), ("--plan-only", "--resume")):
        second = invoke("compile", model, "--uniform", "2", *UNIFORM[2:], "-o", out, *more)
        assert second.exit_code == 75 and f"error: another compile is writing `{out}`" in second.stderr
        assert "hint: " in second.stderr
    plan = invoke("compile", model, *UNIFORM, "-o", out, "--plan-only")
    assert plan.exit_code == 0, "it neither reads nor writes there"
    other = invoke("compile", model, "--uniform", "2", *UNIFORM[2:], "-o", tmp_path / "other")
    assert other.exit_code == 0, other.stderr
    _, said = first.communicate("go on\n", timeout=600)
    assert first.returncode == 0, said
    assert check_bundle(out)["bits"]["formats"] == {"q4g64": 6}
    suffixes = ("", ".log.json", ".report.html")
    assert names(tmp_path) == {name + suffix for name in ("out", "other") for suffix in suffixes}


def test_a_file_of_ones_own_is_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / "out.lock"
    kinds = {
        "text": lambda: lock.write_text("mine"),
        "link": lambda: lock.symlink_to("elsewhere"),
        "folder": lock.mkdir,
    }
    for make in kinds.values():
        make()
        with pytest.raises(MoecError, match=r"out\.lock"), hold_output(tmp_path / "out", Disk(), pytest.fail):
            raise AssertionError("held")
        assert os.path.lexists(lock)
        lock.rmdir() if lock.is_dir() else lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(OptionError, match="in the way"), hold_output(tmp_path / "out", Disk(), pytest.fail):
        raise AssertionError("held")


def test_a_lock_that_was_removed_while_it_was_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on the first file has no effect, because its owner has removed the file from its path."""
    flock, calls = output_lock.fcntl.flock, list[int]()

    def lock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / "out.lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(output_lock.fcntl, "flock", lock)
    with hold_output(tmp_path / "out", Disk(), pytest.fail):
        assert len(calls) == 2 and names(tmp_path) == {"out.lock"}
    assert names(tmp_path) == set()


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(output_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_lock.fcntl, "flock", refuse)
    notes: list[str] = []
    with hold_output(tmp_path / "out", Disk(), notes.append):
        pass
    assert len(notes) == 1 and "has no locks" in notes[0]


def test_missing_folders_are_made(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "no" / "such" / "out"
    refused = invoke("compile", model, "--uniform", "4", "--group-size", "96", *UNIFORM[2:], "-o", out)
    assert refused.exit_code == 1 and names(tmp_path) == set(), "what is refused leaves no folder"
    estimated = invoke("compile", model, *UNIFORM, "-o", out, "--estimate")
    assert estimated.exit_code == 0 and names(tmp_path) == set(), estimated.stderr
    result = invoke("compile", model, *UNIFORM, "-o", out)
    assert result.exit_code == 0, result.stderr
    check_bundle(out)
    (tmp_path / "file").write_text("mine")
    result = invoke("compile", model, *UNIFORM, "-o", tmp_path / "file" / "out")
    assert result.exit_code == 1 and f"`{tmp_path / 'file'}` is not a folder" in result.stderr


# -- cut off after the bundle has its name -----------------------------------------------------------------------------

PLACES = ("before the report", "before the removal", "inside the removal")


@pytest.fixture(scope="module")
def cut_off(model: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Path, tuple[str, ...]]:
    """Files at each place where a compile could be cut off, in a folder of that name, and the words of the compile."""
    root = tmp_path_factory.mktemp("cut")
    save_texts(root / "whole" / "texts", train=4, validation=4, test=6)
    small = ("--bits", "2,16", "--group-size", "32", "--dense-bits", "8", "--no-comparisons", "--swaps", "0")
    arguments = ("compile", str(model), "--kl", "0.5", "--data", "texts", *small, *UNIFORM[2:], "-o", "out")
    write_report, forget, remove_tree = compile_command.write_beside, work_folder.forget, Disk.remove_tree

    def keep(place: str) -> None:
        if not (root / place).exists():
            shutil.copytree(root / "whole", root / place)

    def keep_and_write(*values: Any) -> Any:
        keep(PLACES[0])
        return write_report(*values)

    def keep_and_forget(*values: Any) -> None:
        keep(PLACES[1])
        forget(*values)

    def remove_and_keep(disk: Disk, path: Path) -> None:
        remove_tree(disk, path)
        if path.parent.name == "out.work" and path.parent.with_name("out").exists():
            keep(PLACES[2])

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root / "whole")
        patched.setattr(compile_command, "write_beside", keep_and_write)
        patched.setattr(work_folder, "forget", keep_and_forget)
        patched.setattr(Disk, "remove_tree", remove_and_keep)
        result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0 and names(root) == {"whole", *PLACES}, result.stderr
    return root, arguments


@pytest.mark.parametrize("place", PLACES)
def test_a_complete_bundle_is_finished_by_a_resumed_run(
    invoke: Invoke, cut_off: tuple[Path, tuple[str, ...]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, arguments = cut_off
    folder = root / place
    monkeypatch.chdir(folder)
    whole = contents(folder / "out")
    assert {"out.work", "out.lock"} <= names(folder), "a lock that no process holds refuses no run"
    assert ("out.log.json" in names(folder)) == (place != "before the report")
    plain = invoke(*arguments)
    assert plain.exit_code == 1 and "exists" in plain.stderr and "out.work" in names(folder)
    other = invoke(*arguments, "--resume", "--seed", "1")
    assert other.exit_code == 1 and "exists" in other.stderr and "out.work" in names(folder)
    with monkeypatch.context() as patched:
        patched.setattr("moec.compiler.pipeline.make_plan", lambda stage: pytest.fail("it was done already"))
        result = invoke(*arguments, "--resume", "--json")
    assert result.exit_code == 0, result.stderr
    assert "is complete" in result.stderr and contents(folder / "out") == whole
    assert json.loads(result.stdout) == json.loads(whole["quality.json"])
    assert names(folder) == {"texts", "out", "out.log.json", "out.report.html"}
    assert json.loads((folder / "out.log.json").read_text())["events"][-1]["event"] == "done"
    log = (folder / "out.log.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("moec.compiler.pipeline.make_plan", lambda stage: pytest.fail("it was done already"))
        again = invoke(*arguments, "--resume", "--json")
    assert again.exit_code == 0, again.stderr
    assert "`out` is complete: an earlier run of these inputs and options wrote it" in again.stderr
    assert (again.stdout, (folder / "out.log.json").read_bytes()) == (result.stdout, log)
    for more in (("--limit", "3"), ("--modes", "dynamic-precision"), ("--comparisons",)):
        other = invoke(*arguments, "--resume", *more)
        assert other.exit_code == 1 and "error: `out` exists" in other.stderr, (more, other.stderr)
    for split in ("train", "validation", "test"):
        with (folder / "texts" / f"{split}.jsonl").open("r+") as file:
            end = len(file.read())
            file.write('{"text": "another lamp"}\n')
            file.flush()
            other = invoke(*arguments, "--resume")
            assert other.exit_code == 1 and "error: `out` exists" in other.stderr, (split, other.stderr)
            file.truncate(end)
    assert names(folder) == {"texts", "out", "out.log.json", "out.report.html"}


def test_the_plan_of_a_bundle_is_the_one_that_was_compiled(model: Path, tmp_path: Path) -> None:
    from moec.runtime.bundle.open_bundle import open_bundle
    from tests.tiny_compile import compile_tiny

    plan = compile_tiny(model, tmp_path / "out", "uniform", 8, fallback_bits=2).plan
    found = finished.plan_of(open_bundle(tmp_path / "out").manifest)
    assert found == plan and found.digest == plan.digest and list(found.units) == list(plan.units)


COMMON = (
    "--data", "texts", "--task", "perplexity", "--bits", "2,16", "--group-size", "32", "--dense-bits", "8",
    "--no-comparisons", "--device", "raspberry-pi-4b-sd",
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and texts."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "tiny", layers=1, experts=2)
    save_texts(tmp_path / "texts", train=4, validation=4, test=6)
    return tmp_path


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_sweep_leaves_what_a_loss_takes(invoke: Invoke, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("compile", "tiny", *COMMON, "--loss", "50%", "-o", "alone").exit_code == 0
    kept = (*COMMON, "--measurements", "kept")
    swept = invoke("compile", "tiny", *kept, "--sweep", "20%,50%", "-o", "curve")
    assert swept.exit_code == 0, swept.stderr
    monkeypatch.setattr("moec.compiler.stages.sweep.LayerQuantizer.run", interrupted)
    result = invoke("compile", "tiny", *kept, "--loss", "50%", "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert "finished stages from `kept`" in result.stderr
    assert contents(place / "out") == contents(place / "alone")


def test_an_interrupt_says_that_the_same_command_continues(
    invoke: Invoke, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("compile", "tiny", *COMMON, "--measurements", "kept", "--kl", "0.2", "-o", "out")
    with monkeypatch.context() as patched:
        patched.setattr(bundle_stages, "emit", interrupted)
        result = invoke(*command)
    assert result.exit_code == 130
    assert "finished stages are in `kept`; the same command with `--resume` continues" in result.stderr
    assert invoke(*command, "--resume").exit_code == 0


def test_a_file_is_refused_and_kept(invoke: Invoke, place: Path) -> None:
    (place / "kept").write_text("notes")
    result = invoke("compile", "tiny", *COMMON, "--measurements", "kept", "--kl", "0.2", "-o", "out")
    assert result.exit_code == 1
    assert "`--measurements kept` is a file, expected a folder" in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert (place / "kept").read_text() == "notes"
    assert names(place) == {"tiny", "texts", "kept"}


@pytest.mark.parametrize(
    ("folder", "devices"), [("out", ""), ("out.work", ""), ("out/kept", ""), ("out-laptop", ",laptop")]
)
def test_a_folder_in_the_way_of_the_bundle_is_refused(invoke: Invoke, place: Path, folder: str, devices: str) -> None:
    """Publishing the bundle would remove it, or another compile would."""
    *rest, device = COMMON
    line = ("compile", "tiny", *rest, f"{device}{devices}", "--kl", "0.2", "-o", "out", "--measurements", folder)
    result = invoke(*line)
    assert result.exit_code == 1
    assert f"`--measurements {folder}` is in the way of the bundle `out`" in result.stderr
    assert names(place) == {"tiny", "texts"}
