"""Processes that moec starts import nothing from the current folder, and end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moec.cli.bundle_check import check_bundle, own_command
from tests.interrupts import hear_interrupts

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that modules in the current folder write when they are imported."""
    mark, folder = tmp_path / "imported", tmp_path / "foreign"
    (folder / "moec").mkdir(parents=True)
    for name in ("json.py", "runpy.py", "numpy.py", "sitecustomize.py", "moec/__init__.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return mark


def test_the_self_test_in_a_foreign_folder(marked: Path) -> None:
    assert "self-test: the logits of" in check_bundle(EXAMPLE)
    assert not marked.exists()


def test_the_command_line_in_a_foreign_folder(marked: Path) -> None:
    command = own_command("moec.cli.main", "installed", "nothing here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "`nothing here` is no folder of installed bundles" in done.stderr
    assert not marked.exists()


WAITING = """
import sys
from moec.cli import bundle_check
work = f"import os, pathlib, time; pathlib.Path({sys.argv[1]!r}).write_text(str(os.getpid())); time.sleep(100)"
own_command = bundle_check.own_command
bundle_check.own_command = lambda *given: own_command("timeit", "-n", "1", "-r", "1", work)
bundle_check.check_bundle("a bundle")
"""
"""A self-test that writes its number into a file, and does not end."""


def is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.gate("G13")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_self_test_ends_with_the_process_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    note = tmp_path / "number"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, note],
        stderr=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,  # noqa: PLW1509
    ) as parent:
        while not note.is_file() or not note.read_text():
            assert parent.poll() is None
            time.sleep(0.01)
        child = int(note.read_text())
        assert is_running(child)
        parent.send_signal(number)
        parent.wait(60)
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "the self-test runs on"
        time.sleep(0.01)
