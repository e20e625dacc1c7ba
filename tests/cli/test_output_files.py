"""Files that commands write: places, what existed stays, and signals leave nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
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
from moec.runtime.tuning.mode_records import check_record, write_record
from moec.runtime.tuning.tune_file import Tuning, check_tuning, write_tuning
from tests.tiny_compile import contents, names, save_model

from .conftest import Invoke

PAST = ("reads", "mode:", "[0:")
"""Messages of commands after their work has begun."""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"task_id": "a", "prompt": "Hello"}\n{"task_id": "b", "prompt": "World"}\n')
    return path


@pytest.fixture
def writing(bundle: Path, prompts: Path, texts: Path) -> dict[str, tuple[object, ...]]:
    """Commands that write one file, without its name."""
    return {
        "generate": ("generate", bundle, "--prompts", prompts, "--max-new-tokens", 2, "--out"),
        "eval": ("eval", bundle, "--data", texts, "--limit", 1, "--per-item"),
        "bench": ("bench", bundle, "--tokens", 2, "--prompt", "Hello", "--trace-out"),
        "run": ("run", bundle, "--prompt", "Hello", "--max-new-tokens", 2, "--trace-out"),
        "profile-device": ("profile-device", "--storage", texts.parent, "-o"),
    }


COMMANDS = ("generate", "eval", "bench", "run", "profile-device")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_is_written_to_and_stays(
    invoke: Invoke, writing: dict[str, tuple[object, ...]], command: str, tmp_path: Path
) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("wb").close()
    except OSError as problem:
        pytest.skip(f"no device can be made here: {problem}")
    result = invoke(*writing[command], device)
    assert result.exit_code == 0, result.stderr
    assert stat.S_ISCHR(device.lstat().st_mode) and device.lstat().st_rdev == os.makedev(1, 3)


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_are_made_and_links_are_followed(
    invoke: Invoke, writing: dict[str, tuple[object, ...]], command: str, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("made/by/it")
    result = invoke(*writing[command], tmp_path / "link")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "link").is_symlink() and (tmp_path / "made" / "by" / "it").stat().st_size > 50
    assert [each.name for each in (tmp_path / "made" / "by").iterdir()] == ["it"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["", "x" * 300, "with\0zero", "prompts.jsonl/x"], ids=lambda name: repr(name[:12]))
def test_a_bad_place_is_refused_before_the_work(
    invoke: Invoke, writing: dict[str, tuple[object, ...]], command: str, name: str, tmp_path: Path, prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = invoke(*writing[command], name)
    assert result.exit_code in (1, 2) and result.stdout == "", result.stderr
    assert "Traceback" not in result.stderr and not any(word in result.stderr for word in PAST)
    assert len(result.stderr) < 700 and sorted(tmp_path.rglob("*")) == before


def test_generated_lines_on_standard_output(
    invoke: Invoke, writing: dict[str, tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*writing["generate"], "-")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["task_id"] for line in lines] == ["a", "b"]
    assert not (tmp_path / "-").exists()
    assert invoke(*writing["generate"], "./-").exit_code == 0 and len((tmp_path / "-").read_text().splitlines()) == 2


PATHS = {
    "run": ("run", "PATH", "--prompt", "x"),
    "generate": ("generate", "PATH", "--prompts", "PATH", "-o", "out"),
    "inspect": ("inspect", "PATH"),
    "verify": ("verify", "PATH"),
    "pack": ("pack", "PATH"),
    "pack into": ("pack", "BUNDLE", "PATH"),
    "unpack": ("unpack", "PATH"),
    "unpack into": ("unpack", "FILE", "PATH"),
    "compile": ("compile", "PATH", "--uniform", "4"),
    "compile into": ("compile", "CHECKPOINT", "--uniform", "4", "-o", "PATH"),
    "compile for": ("compile", "CHECKPOINT", "--uniform", "4", "--device", "PATH", "-o", "out"),
    "compile with": ("compile", "CHECKPOINT", "--loss", "2%", "--data", "PATH", "-o", "out"),
    "eval": ("eval", "BUNDLE", "--data", "PATH"),
    "bench": ("bench", "PATH"),
    "simulate": ("simulate", "BUNDLE", "--trace", "PATH"),
    "simulate on": ("simulate", "BUNDLE", "--trace", "FILE", "--profile", "PATH"),
    "tune": ("tune", "PATH"),
}


@pytest.mark.parametrize("use", PATHS)
@pytest.mark.parametrize("name", ["", "/", "a/" * 2500, "with\0zero"], ids=lambda n: repr(n[:5]))
def test_a_path_that_is_none_is_a_sentence(
    invoke: Invoke, bundle: Path, checkpoint: Path, tmp_path: Path, use: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("nothing")
    known = {"PATH": name, "BUNDLE": bundle, "CHECKPOINT": checkpoint, "FILE": "file"}
    result = invoke(*(known.get(part, part) for part in PATHS[use]))
    assert result.exit_code in (1, 2) and result.stdout == "", result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr) < 1200
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_packing_makes_folders_and_writes_no_archive_to_standard_output(
    invoke: Invoke, bundle: Path, tmp_path: Path
) -> None:
    result = invoke("pack", bundle, tmp_path / "a" / "b.moec")
    assert result.exit_code == 0, result.stderr
    result = invoke("unpack", tmp_path / "a" / "b.moec", tmp_path / "c" / "d")
    assert result.exit_code == 0 and (tmp_path / "c" / "d" / "moec.json").is_file()
    for refused in (("pack", bundle, "-"), ("unpack", tmp_path / "a" / "b.moec", "-"), ("pack", bundle, "z" * 250)):
        assert invoke(*refused).exit_code == 1
    (tmp_path / "e").mkdir()
    damaged = tmp_path / "damaged.moec"
    damaged.write_bytes((tmp_path / "a" / "b.moec").read_bytes()[:100])
    assert invoke("unpack", damaged, tmp_path / "none" / "f").exit_code == 3
    assert not (tmp_path / "none").exists(), "folders that were made for nothing are taken away"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("command", ["tune", "eval --modes"])
def test_what_cannot_be_kept_next_to_a_bundle_is_known_before_measuring(
    bundle: Path, texts: Path, tmp_path: Path, command: str
) -> None:
    shutil.copytree(bundle, tmp_path / "disk" / "b")
    options = ["tune"] if command == "tune" else ["eval", "--data", str(texts), "--modes", "dynamic-precision 0.6,1"]
    arguments = [options[0], str(tmp_path / "disk" / "b"), *options[1:]]
    script = f'mount --bind "{tmp_path}/disk" "{tmp_path}/disk" && mount -o remount,bind,ro "{tmp_path}/disk" && "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-m", "moec.cli.main", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 1 and done.stdout == "" and "Read-only file system" in done.stderr
    assert not any(word in done.stderr for word in ("tuning", *PAST)), done.stderr


EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = ("--prompt", "hi", "--max-new-tokens", 2)


@pytest.fixture
def example(tmp_path: Path) -> Path:
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
def test_no_command_writes_into_a_bundle(words: tuple[object, ...], example: Path, invoke: Invoke) -> None:
    before = contents(example)
    result = invoke(*(str(word).format(bundle=example) for word in words))
    assert result.exit_code == 1 and "lies in the bundle" in result.stderr, result.stderr
    assert contents(example) == before


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "{bundle}", "--prompts", "{file}", "-o", "{file}"),
        ("eval", "{bundle}", "--task", "gsm8k", "--data", "{file}", "--per-item", "{file}"),
        ("eval", "{bundle}", "--task", "gsm8k", "--data", "{file}", "--per-item", "{link}"),
        ("bench", "{bundle}", "--text", "{file}", "--trace-out", "{file}"),
    ],
)
def test_no_command_writes_what_it_reads(words: tuple[str, ...], example: Path, tmp_path: Path, invoke: Invoke) -> None:
    file, link = tmp_path / "input.jsonl", tmp_path / "link.jsonl"
    file.write_text(json.dumps({"prompt": "hi", "question": "1 + 1?", "answer": "#### 2"}) + "\n")
    link.symlink_to(file)
    before = file.read_bytes()
    result = invoke(*(word.format(bundle=example, file=file, link=link) for word in words))
    assert result.exit_code == 1 and "is read by this command, so it cannot be written" in result.stderr
    assert file.read_bytes() == before and link.is_symlink()


def test_two_runs_do_not_share_a_target(example: Path, tmp_path: Path, invoke: Invoke) -> None:
    packed = tmp_path / "packed.moec"
    with hold_output(packed, Disk(), print):
        result = invoke("pack", example, packed)
        assert result.exit_code == 75 and f"another pack is writing `{packed}`" in result.stderr
    assert invoke("pack", example, packed).exit_code == 0
    folder = tmp_path / "unpacked"
    with hold_output(folder, Disk(), print):
        result = invoke("unpack", packed, folder)
        assert result.exit_code == 75 and f"another unpack is writing `{folder}`" in result.stderr
    assert invoke("unpack", packed, folder).exit_code == 0 and contents(folder) == contents(example)
    assert names(tmp_path) == {"bundle", "packed.moec", "unpacked"}


def test_a_text_without_end_is_refused(example: Path, invoke: Invoke) -> None:
    result = invoke("bench", example, "--text", "/dev/zero")
    assert result.exit_code == 1 and "is no regular file" in result.stderr


def test_a_long_text_is_read_at_its_start(example: Path, tmp_path: Path, invoke: Invoke) -> None:
    text = tmp_path / "long.txt"
    with text.open("wb") as file:
        file.write("3 boxes of 12 pens \u00fc ".encode() * 40)
        file.truncate(4 << 30)  # the rest has no blocks on the disk, and would take 4 GiB of memory
    result = invoke("bench", example, "--text", text, "--prompt-tokens", 4, "--tokens", 4, "--context", 64)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("storage", ["missing", "/dev/null", "small"])
def test_a_place_without_a_disk_is_not_measured(storage: str, tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "small").write_bytes(b"x")
    place = tmp_path / storage
    result = invoke("profile-device", "--storage", place)
    assert result.exit_code == 1 and f"`--storage {place}`" in result.stderr and not result.stdout


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


NEXT_TO = {
    ".tune.json": (check_tuning, lambda bundle: write_tuning(bundle, Tuning("m", "s", "b", 1, {})), "machine"),
    ".modes.json": (check_record, lambda bundle: write_record(bundle, {"task": "t", "rows": []}), "bundle"),
}


@pytest.mark.gate("G10")
@pytest.mark.parametrize("kind", ["earlier", "another", "empty", "link to an earlier one", "link to nothing", "folder"])
@pytest.mark.parametrize("suffix", NEXT_TO)
def test_files_next_to_a_bundle_replace_those_of_earlier_versions_alone(
    suffix: str, kind: str, example: Path, tmp_path: Path
) -> None:
    check, write, name = NEXT_TO[suffix]
    place, other = tmp_path / f"bundle{suffix}", tmp_path / "other"
    earlier = json.dumps({"format_version": 1, name: "0" * 64, "rows": []}, indent=1) + "\n"
    content = {"another": '{"format_version": 1, "owner": "me"}', "empty": ""}.get(kind, earlier)
    other.write_text(earlier)
    if kind.startswith("link"):
        place.symlink_to("nothing" if kind == "link to nothing" else other.name)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_text(content)
    if kind == "earlier":
        check(example)
        assert write(example) == place and place.read_text() != earlier
        return
    for work in (check, write):
        with pytest.raises(InputError, match="so it is not replaced"):
            work(example)
    assert place.is_symlink() == kind.startswith("link") and other.read_text() == earlier
    assert not place.is_file() or place.is_symlink() or place.read_text() == content
    assert names(tmp_path) == {"bundle", place.name, "other"}
