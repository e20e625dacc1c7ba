"""Every option that names an output file: devices stay, wrong paths are refused before the work, folders are made."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

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
@pytest.mark.parametrize(
    "name",
    ["", "x" * 300, "with\0zero", "prompts.jsonl/x"],
    ids=lambda name: repr(name[:12]),
)
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
