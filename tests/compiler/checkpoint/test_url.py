"""A checkpoint at a URL: files copied, files not copied again, and refusals."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file

from moec.compiler.checkpoint import url as checkpoint_url
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.checkpoint.url import CACHE, fetch, is_url, url_name
from moec.manifests.errors import CheckpointError, DoesNotFit
from tests.tiny_models import TINY_MODELS, save_tiny_mixtral

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of fsspec, for files that fail to open
EVERYTHING = ("*",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny_mixtral(tmp_path_factory.mktemp("url") / "tiny", TINY_MODELS["sharded-half"])
    (made / "training.log").write_text("no part of the model")
    (made / "original").mkdir()
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system of fsspec in memory, empty."""
    system = fsspec.filesystem("memory")
    for leftover in (system.store, system.pseudo_dirs):
        leftover.clear()
    yield system
    for leftover in (system.store, system.pseudo_dirs):
        leftover.clear()


def cached(home: Path) -> Path:
    (only,) = (home / CACHE).iterdir()
    return only


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_url_is_the_same_checkpoint(protocol: str, folder: Path, home: Path, memory: Any) -> None:
    memory.put(str(folder), "memory://models/tiny", recursive=True)
    url = folder.as_uri() if protocol == "file" else "memory://models/tiny"
    there, here = open_checkpoint(url + "/"), open_checkpoint(str(folder))
    assert (there.name, there.tensors, there.config) == (here.name, here.tensors, here.config)
    assert there.source_files() == here.source_files()
    for file in here.weight_files():
        assert load_file(there.root / file).keys() == load_file(folder / file).keys()
    assert not {"training.log", "original"} & {path.name for path in cached(home).iterdir()}


def test_only_what_changed_is_copied_again(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe({"/m/config.json": b"{}", "/m/a.safetensors": b"one", "/m/b.safetensors": b"two"})
    copied: list[str] = []
    opened = type(memory).open
    monkeypatch.setattr(
        type(memory), "open", lambda self, path, *a, **k: (copied.append(path), opened(self, path, *a, **k))[1]
    )
    found = fetch("memory://m", EVERYTHING, tmp_path)
    assert copied == ["/m/a.safetensors", "/m/b.safetensors", "/m/config.json"]
    assert (found / "a.safetensors").read_bytes() == b"one"
    copied.clear()
    assert fetch("memory://m", EVERYTHING, tmp_path) == found and copied == []
    memory.pipe("/m/a.safetensors", b"new")
    memory.rm("/m/b.safetensors")
    copied.clear()
    fetch("memory://m", EVERYTHING, tmp_path)
    assert copied == ["/m/a.safetensors"]
    assert (found / "a.safetensors").read_bytes() == b"new" and not (found / "b.safetensors").exists()


def test_a_copy_that_ends_early_is_no_file_and_is_made_again(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe({"/m/config.json": b"{}", "/m/z.safetensors": b"whole"})
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", lambda self, path, mode: io.BytesIO(self.cat_file(path)[:2]))
        with pytest.raises(CheckpointError, match=r"`memory://m/z.safetensors` ended after 2 bytes, expected 5"):
            fetch("memory://m", EVERYTHING, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "z.safetensors").exists()
    assert (fetch("memory://m", EVERYTHING, tmp_path) / "z.safetensors").read_bytes() == b"whole"


def test_a_state_that_is_damaged_is_forgotten(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/m/config.json", b"{}")
    folder = fetch("memory://m", EVERYTHING, tmp_path)
    for damage in (b"", b"[]", b"\xff"):
        (folder / ".fetched.json").write_bytes(damage)
        (folder / "config.json").write_bytes(b"altered")
        assert (fetch("memory://m", EVERYTHING, tmp_path) / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nothing", "no folder `memory://nothing`, expected a Hugging Face model folder"),
        ("memory://m", "`memory://m` holds no file of a checkpoint"),
        ("gopher://host/m", "`gopher://host/m` cannot be read: Protocol not known: gopher"),
        ("file:///nowhere/m", "no folder `file:///nowhere/m`, expected"),
    ],
)
def test_what_is_refused_leaves_nothing(url: str, message: str, memory: Any, home: Path) -> None:
    memory.pipe("/m/training.log", b"")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(url)
    assert caught.value.message.startswith(message) and caught.value.hint
    assert not (home / CACHE).exists()


def test_names_that_leave_the_folder_are_not_copied(memory: Any, tmp_path: Path) -> None:
    memory.pipe({"/m/config.json": b"{}", "/m/.hidden.json": b"{}", "/m/a b.json": b"{}"})
    folder = fetch("memory://m", EVERYTHING, tmp_path)
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".json") == [".fetched.json", "config.json"]


def test_a_disk_that_is_full_is_named(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/m/config.json", b"{}")

    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint_url.Disk, "write", full)
    with pytest.raises(DoesNotFit, match=r"the disk of `.+` is full"):
        fetch("memory://m", EVERYTHING, tmp_path)


def test_what_is_a_url_and_what_it_calls_the_model() -> None:
    assert is_url("s3://bucket/mixtral") and not is_url("mistralai/Mixtral-8x7B") and not is_url("C:/mixtral")
    assert [url_name(url) for url in ("s3://b/mixtral/", "memory://m", "file:///", "hf://a/b/c")] == [
        "mixtral", "m", "model", "c",
    ]  # fmt: skip
