"""Processes that moec starts import nothing from the current folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moec.cli.bundle_check import check_bundle
from moec.cli.own_process import own_command

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
