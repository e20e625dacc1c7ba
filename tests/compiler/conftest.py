"""Checkpoints and texts that are small enough for whole compiles, and little memory or few tokens for them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from moec.compiler.stages import encode_texts
from moec.compiler.walker import memory
from tests.compiler.checkpoint import write_packed
from tests.compiler.lowered import save_family
from tests.tiny_compile import little_memory, save_model, save_texts
from tests.tiny_models import TinyMixtral, save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe

TOOLS = Path(__file__).parents[2] / "build" / "quantization-tools"
CONVERTER = TOOLS.with_name("llama.cpp")
TINY_PLAIN = TinyMixtral(layers=2, experts=4, width=64, hidden_size=64, heads=2, kv_heads=1, head_size=32)
"""The checkpoint that `quantized` quantizes."""
BUILDERS = {
    "mixtral": save_tiny_mixtral,
    "olmoe": partial(save_tiny_olmoe, tiny=TinyMixtral(kv_heads=2, experts=5)),
    "qwen3_moe": partial(save_tiny_qwen3_moe, tiny=TinyMixtral(kv_heads=2, experts=5, head_size=32)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one layer of three experts."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny", layers=1, experts=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral checkpoint."""
    return save_tiny_mixtral(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _filled(folder: Path, target: str) -> Path:
    """Return a folder that a target of the Makefile has filled. Skips without it, and fails where it must be there."""
    if not (folder / ".ready").exists():
        if os.environ.get("CI"):
            pytest.fail(f"`make {target}` has not filled build/{folder.name}")
        pytest.skip(f"needs `make {target}`")
    return folder


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of the original quantizers."""
    return _filled(TOOLS, "quantization-tools")


@pytest.fixture(scope="session")
def converter() -> Path:
    """The folder of llama.cpp's converter."""
    return _filled(CONVERTER, "gguf-converter")


@pytest.fixture(scope="session")
def quantized(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the checkpoint of a layout. One process writes all of them for the others."""
    # One folder for all processes of a run: the tools take twelve seconds to load.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            save_tiny_qwen3_moe(folder / "plain", TINY_PLAIN)
            command = [sys.executable, write_packed.__file__, tools, folder / "plain", folder]
            run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
            (folder / "complete").touch()
    return lambda layout: folder / layout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the checkpoint of a family, written once."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def folder_of(family: str) -> Path:
        return BUILDERS.get(family, partial(save_family, family))(root / family)

    return folder_of


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one layer: none stays between passes."""
    little_memory(monkeypatch.setattr)


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calibration take few tokens, and gradients few texts, so that train texts are left."""
    small = replace(memory.LARGE_TEXTS, calibration=40)
    monkeypatch.setattr(memory, "LARGE_TEXTS", small)
    monkeypatch.setattr(encode_texts, "TEXTS", 4)
