"""`moec compile --measurements`: a folder that a sweep and later targets share, its hints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moec.compiler.stages import bundle as bundle_stages
from moec.compiler.stages import sweep as sweep_stage
from tests.tiny_compile import contents, names, save_model, save_texts

from .conftest import Invoke

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
    monkeypatch.setattr(sweep_stage.LayerQuantizer, "run", interrupted)
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
