"""Outputs replace no input and no file of a bundle, two runs do not share a target, and signals leave nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moec.cli.terminal.compile_log import LOG_MARK
from moec.cli.terminal.compile_result import REPORT_MARK
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.output_lock import hold_output
from moec.manifests.errors import InputError
from moec.manifests.files.implied_names import check_implied
from tests.tiny_compile import contents, names, save_model

from .conftest import Invoke

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = ("--prompt", "hi", "--max-new-tokens", 2)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / "bundle", tmp_path / "bundle"))


@pytest.mark.parametrize(
    "words",
    [
        ("run", "{bundle}", *RUN, "--trace-out", "{bundle}/moec.json"),
        ("run", "{bundle}", *RUN, "--trace-out", "{bundle}/further.trace"),
        ("report", "{bundle}", "-o", "{bundle}/quality.json"),
        ("pack", "{bundle}", "{bundle}/packed.moec"),
    ],
)
def test_no_command_writes_into_a_bundle(words: tuple[object, ...], bundle: Path, invoke: Invoke) -> None:
    before = contents(bundle)
    result = invoke(*(str(word).format(bundle=bundle) for word in words))
    assert result.exit_code == 1 and "lies in the bundle" in result.stderr, result.stderr
    assert contents(bundle) == before


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "{bundle}", "--prompts", "{file}", "-o", "{file}"),
        ("eval", "{bundle}", "--task", "gsm8k", "--data", "{file}", "--per-item", "{file}"),
        ("eval", "{bundle}", "--task", "gsm8k", "--data", "{file}", "--per-item", "{link}"),
        ("bench", "{bundle}", "--text", "{file}", "--trace-out", "{file}"),
    ],
)
def test_no_command_writes_what_it_reads(words: tuple[str, ...], bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    file, link = tmp_path / "input.jsonl", tmp_path / "link.jsonl"
    file.write_text(json.dumps({"prompt": "hi", "question": "1 + 1?", "answer": "#### 2"}) + "\n")
    link.symlink_to(file)
    before = file.read_bytes()
    result = invoke(*(word.format(bundle=bundle, file=file, link=link) for word in words))
    assert result.exit_code == 1 and "is read by this command, so it cannot be written" in result.stderr
    assert file.read_bytes() == before and link.is_symlink()


def test_two_runs_do_not_share_a_target(bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    packed = tmp_path / "packed.moec"
    with hold_output(packed, Disk(), print):
        result = invoke("pack", bundle, packed)
        assert result.exit_code == 75 and f"another pack is writing `{packed}`" in result.stderr
    assert invoke("pack", bundle, packed).exit_code == 0
    folder = tmp_path / "unpacked"
    with hold_output(folder, Disk(), print):
        result = invoke("unpack", packed, folder)
        assert result.exit_code == 75 and f"another unpack is writing `{folder}`" in result.stderr
    assert invoke("unpack", packed, folder).exit_code == 0 and contents(folder) == contents(bundle)
    assert names(tmp_path) == {"bundle", "packed.moec", "unpacked"}


def test_a_text_without_end_is_refused(bundle: Path, invoke: Invoke) -> None:
    result = invoke("bench", bundle, "--text", "/dev/zero")
    assert result.exit_code == 1 and "is no regular file" in result.stderr


def test_a_long_text_is_read_at_its_start(bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    text = tmp_path / "long.txt"
    with text.open("wb") as file:
        file.write("3 boxes of 12 pens \u00fc ".encode() * 40)
        file.truncate(4 << 30)  # the rest has no blocks on the disk, and would take 4 GiB of memory
    result = invoke("bench", bundle, "--text", text, "--prompt-tokens", 4, "--tokens", 4, "--context", 64)
    assert result.exit_code == 0, result.stderr


def test_a_trace_without_rates_is_told(bundle: Path, tmp_path: Path, invoke: Invoke) -> None:
    trace = tmp_path / "a.trace"
    assert invoke("run", bundle, *RUN, "--trace-out", trace).exit_code == 0
    result = invoke("report", bundle, "--trace", trace, "-o", tmp_path / "r.html")
    assert result.exit_code == 1 and "has no rates of its machine" in result.stderr


@pytest.mark.parametrize("storage", ["missing", "/dev/null", "small"])
def test_a_place_without_a_disk_is_not_measured(storage: str, tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "small").write_bytes(b"x")
    place = tmp_path / storage
    result = invoke("profile-device", "--storage", place)
    assert result.exit_code == 1 and f"`--storage {place}`" in result.stderr and not result.stdout


def test_a_comparison_of_nothing_says_so(tmp_path: Path, invoke: Invoke) -> None:
    result = invoke("compare", tmp_path / "nowhere")
    assert result.exit_code == 1 and "does not exist, expected a bundle folder" in result.stderr


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("memory", ["100MiB", "300MiB", "450MiB"])
def test_a_compile_with_too_little_memory_names_its_own_option(memory: str, tmp_path: Path, invoke: Invoke) -> None:
    """Not that of the runtime, and no number of bytes that nobody gave."""
    model = save_model(tmp_path / "model", layers=1, experts=2)
    result = invoke("compile", model, "--uniform", 4, "--memory", memory, "-o", tmp_path / "out")
    assert result.exit_code == 1 and "MiB to run its bundle, which needs more" in result.stderr, result.stderr
    assert "raise `--memory`" in result.stderr and "--context" not in result.stderr
    assert names(tmp_path) == {"model", "out.log.json"} or names(tmp_path) == {"model"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_an_interrupt_does(number: signal.Signals, tmp_path: Path) -> None:
    """An evaluation of a checkpoint writes a whole bundle to the folder for temporary files, and removes it."""

    # Under `nohup` the signal is ignored, and a command leaves it so.
    program = f"import signal; signal.signal({int(number)}, signal.SIG_DFL); from moec.cli.main import main; main()"
    folder = tmp_path / "temporary"
    folder.mkdir()
    words = ["eval", str(EXAMPLES / "model"), "--task", "gsm8k", "--data", str(EXAMPLES / "data" / "gsm8k")]
    run = subprocess.Popen(
        [sys.executable, "-c", program, *words], env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not any(folder.iterdir()) and run.poll() is None:
            time.sleep(0.05)
        run.send_signal(number)
        _, told = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 128 + number and told.rstrip().endswith("interrupted"), told
    assert not any(folder.iterdir())


EARLIER = {
    "a log of events alone": (LOG_MARK, b'{\n "events": [\n  {\n   "seconds": 0.1,\n   "event": "x"\n  }\n ]\n}\n'),
    "a log with stages": (LOG_MARK, b'{\n "events": [\n  {\n   "seconds": 0.1\n  }\n ],\n "stages": []\n}\n'),
    "a report without generator": (REPORT_MARK, b"<!doctype html>\n<html>from <code>moec.json</code> and x"),
    "another log": (LOG_MARK, b'{"events": ["mine"]}'),
    "another page": (REPORT_MARK, b"<!doctype html>\n<html><p>mine"),
}  # fmt: skip


@pytest.mark.gate("G10")
@pytest.mark.parametrize("name", EARLIER)
def test_files_of_earlier_versions_are_replaced_and_those_of_others_stay(name: str, tmp_path: Path) -> None:
    mark, content = EARLIER[name]
    (tmp_path / "file").write_bytes(content)
    if name.startswith("another"):
        with pytest.raises(InputError, match="was not written by moec"):
            check_implied(tmp_path / "file", mark)
    else:
        check_implied(tmp_path / "file", mark)
