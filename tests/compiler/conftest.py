"""A model and texts that are small enough for whole compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_compile import save_model, save_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one layer of three experts."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny", layers=1, experts=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("data") / "texts")
