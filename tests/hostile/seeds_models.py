"""Seeds of model folders: files of a checkpoint that are not what their names say."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

from tests.hostile.seed import Seed

MODEL = Path(__file__).parents[2] / "examples" / "model"
COMPILE = ("compile", "{bundle}/../model", "--uniform", "16", "--plan-only", "-o", "{work}/x")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
INDEX = "model.safetensors.index.json"


def _model(files: dict[str, bytes], bundle: Path) -> None:
    """Copy the example model next to a bundle, and write other files into it. An index gets the weights as a shard."""
    folder = Path(shutil.copytree(MODEL, bundle.with_name("model")))
    if INDEX in files:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _seed(name: str, files: dict[str, bytes]) -> Seed:
    return Seed(f"model: {name}", COMPILE, frozenset({1}), partial(_model, files))


def _index(**tensors: object) -> bytes:
    return json.dumps({"weight_map": tensors}).encode()


def _tokenizer(**changes: object) -> bytes:
    return json.dumps({**json.loads((MODEL / "tokenizer.json").read_bytes()), **changes}).encode()


SEEDS: tuple[Seed, ...] = (
    *(
        _seed(f"a git-lfs pointer as {name}", {name: POINTER})
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ),
    _seed("an index of missing shards", {INDEX: _index(a="model-00001-of-00002.safetensors")}),
    _seed("an index of a path", {INDEX: _index(a="../../secret.safetensors")}),
    _seed("an index of numbers", {INDEX: _index(a=1)}),
    _seed("an index of lists", {INDEX: b'{"weight_map": ' + b"[" * 50_000}),
    _seed("a tokenizer of another model type", {"tokenizer.json": _tokenizer(model={"type": "\x1b[31m"})}),
    _seed(
        "a tokenizer with ids of 64 bits", {"tokenizer.json": _tokenizer(added_tokens=[{"id": 2**63, "content": "a"}])}
    ),
    _seed("a tokenizer without a model", {"tokenizer.json": b"{}"}),
)
