"""A checkpoint that workers open."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.compiler.families import Lowering
from tests.compiler.configured import lowered
from tests.tiny_compile import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cluster") / "tiny", layers=2, experts=4)


@pytest.fixture(scope="module")
def lowering(folder: Path) -> Lowering:
    return lowered(folder)
