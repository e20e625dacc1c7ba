"""Model folders whose files are not what their names say: one sentence, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .conftest import Invoke

MODEL = Path(__file__).parents[2] / "examples" / "model"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
INDEX = "model.safetensors.index.json"


def _model(files: dict[str, bytes], folder: Path) -> None:
    """Copy the example model, and write other files into it. An index gets the weights as a shard."""
    shutil.copytree(MODEL, folder)
    if INDEX in files:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _index(**tensors: object) -> bytes:
    return json.dumps({"weight_map": tensors}).encode()


def _tokenizer(**changes: object) -> bytes:
    return json.dumps({**json.loads((MODEL / "tokenizer.json").read_bytes()), **changes}).encode()


CASES: tuple[tuple[str, dict[str, bytes]], ...] = (
    *(
        (f"a git-lfs pointer as {name}", {name: POINTER})
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ),
    ("an index of missing shards", {INDEX: _index(a="model-00001-of-00002.safetensors")}),
    ("an index of a path", {INDEX: _index(a="../../secret.safetensors")}),
    ("an index of numbers", {INDEX: _index(a=1)}),
    ("an index of lists", {INDEX: b'{"weight_map": ' + b"[" * 50_000}),
    ("a tokenizer of another model type", {"tokenizer.json": _tokenizer(model={"type": "\x1b[31m"})}),
    ("a tokenizer with ids of 64 bits", {"tokenizer.json": _tokenizer(added_tokens=[{"id": 2**63, "content": "a"}])}),
    ("a tokenizer without a model", {"tokenizer.json": b"{}"}),
)


@pytest.mark.parametrize("files", [pytest.param(files, id=name) for name, files in CASES])
def test_a_file_that_is_not_what_its_name_says(files: dict[str, bytes], invoke: Invoke, tmp_path: Path) -> None:
    _model(files, tmp_path / "model")
    refused = invoke("compile", tmp_path / "model", "--uniform", 16, "--plan-only", "-o", tmp_path / "x")
    assert refused.exit_code == 1 and refused.stderr.count("error: ") == 1, refused.stderr
