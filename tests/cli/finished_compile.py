"""A compile to a KL without comparisons, whose bundle is measured afterwards. Import both fixtures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tiny_compile import save_model, save_texts

from .conftest import Invoke

SMALL = ("--kl", "0.05", "--bits", "2,4,16", "--group-size", "32", "--dense-bits", "8", "--swaps", "0")
PI = ("--device", "raspberry-pi-4b-sd")

__all__ = ["bundle", "place"]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    save_model(folder / "tiny", layers=1, experts=2)
    save_texts(folder / "texts", train=4, validation=4, test=6)
    return folder


@pytest.fixture
def bundle(place: Path, tmp_path: Path, invoke: Invoke) -> Path:
    """A copy of the bundle, with its log next to it."""
    made = place / "out"
    if not made.exists():
        data = ("--data", place / "texts")
        result = invoke("compile", place / "tiny", *data, *SMALL, *PI, "--no-comparisons", "-o", made)
        assert result.exit_code == 0, result.stderr
    for path in place.glob("out.*"):
        shutil.copy(path, tmp_path / path.name)
    return Path(shutil.copytree(made, tmp_path / "out"))
