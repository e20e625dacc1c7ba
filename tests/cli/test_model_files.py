"""Files of an untrusted model folder are refused before any work in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import CheckpointError
from tests.tiny_compile import check_bundle, compile_tiny, names, save_model

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
UNIFORM = ("--uniform", "4", "--device", "raspberry-pi-4b-sd")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("files") / "tiny", layers=1, experts=2)


@pytest.fixture
def model(place: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(place, tmp_path / "tiny"))


TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no model": lambda plain: plain.pop("model"),
    "another model type": lambda plain: plain.update(model={"type": "\x1b[31m"}),
    "an id of 64 bits": lambda plain: plain.update(added_tokens=[{"id": 2**63, "content": "a"}]),
    "panics on loading": lambda plain: plain.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "panics on a text": lambda plain: plain.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "knows no word": lambda plain: plain.update(
        model={"type": "WordPiece", "unk_token": "?", "vocab": {}, "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 100}
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", *TOKENIZERS])
def test_a_tokenizer_that_a_run_would_refuse_is_refused_before_work(
    invoke: Invoke, model: Path, tmp_path: Path, content: bytes | str
) -> None:
    path = model / "tokenizer.json"
    if isinstance(content, str):
        plain = json.loads(path.read_text())
        TOKENIZERS[content](plain)
        content = json.dumps(plain).encode()
    path.write_bytes(content)
    result = invoke("compile", model, *UNIFORM, "-o", tmp_path / "out")
    assert result.exit_code == 1 and "tokenizer.json` is not a tokenizer: " in result.stderr
    assert "hint: " in result.stderr and "Traceback" not in result.stderr and names(tmp_path) == {"tiny"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "large", "link to nothing"])
def test_files_of_a_model_that_are_no_files(model: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A pipe would block, and a device has no end. The compile runs in a thread that the process does not wait for."""
    path = model / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to("nowhere")
    found = list[Exception]()

    def compile_it() -> None:
        try:
            compile_tiny(model, tmp_path / "out", "uniform", 4)
        except CheckpointError as error:
            found.append(error)

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(found) == 1
    expected = {
        "pipe": "is a pipe",
        "device": "is a device",
        "large": "1099511627776 bytes",
        "link to nothing": "missing",
    }
    assert name in str(found[0]) and expected[kind] in str(found[0])
    assert not (tmp_path / "out").exists()


def test_a_model_folder_of_links_is_compiled(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    """Hub caches consist of links."""
    (tmp_path / "cache").mkdir()
    for path in model.iterdir():
        (tmp_path / "cache" / path.name).symlink_to(path)
    result = invoke("compile", tmp_path / "cache", *UNIFORM, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert check_bundle(tmp_path / "out")["bits"]["formats"] == {"q4g64": 6}


@pytest.mark.parametrize("content", [b'{"weight_map": {"a": 1}}', b'{"weight_map": ' + b"[" * 50_000])
def test_an_index_that_names_no_files(invoke: Invoke, model: Path, tmp_path: Path, content: bytes) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_bytes(content)
    refused = invoke("compile", model, *UNIFORM, "--plan-only", "-o", tmp_path / "out")
    assert refused.exit_code == 1 and refused.stderr.count("error: ") == 1, refused.stderr
