"""Folders that tools leave incomplete: no index, a stale one, pointers of git-lfs, names that are not UTF-8."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.checkpoint import INDEX_NAME, WEIGHTS_NAME, open_checkpoint
from moec.compiler.families import lower
from moec.manifests.errors import CheckpointError
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 4932528312\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixtral(tmp_path_factory.mktemp("odd") / "tiny", TinyMixtral())


def _divide(folder: Path, files: dict[str, slice]) -> None:
    """Replace the weights by files that hold parts of the sorted tensors."""
    tensors = load_file(folder / WEIGHTS_NAME)
    (folder / WEIGHTS_NAME).unlink()
    for file, part in files.items():
        save_file({name: tensors[name] for name in sorted(tensors)[part]}, folder / file)


def _shard(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def test_whole_shards_need_no_index(copy: Path, folder: Path) -> None:
    _divide(copy, {_shard(1, 2): slice(0, 5), _shard(2, 2): slice(5, None)})
    assert open_checkpoint(str(copy)).tensors.keys() == open_checkpoint(str(folder)).tensors.keys()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({_shard(1, 3): slice(0, 5), _shard(3, 3): slice(5, None)}, "lacks 1 of the 00003 shards"),
        ({_shard(1, 2): slice(0, 5), _shard(2, 2): slice(4, None)}, "lies in both"),
        ({_shard(1, 1): slice(None), _shard(1, 2): slice(0, 5)}, "shards of 2 sets"),
    ],
)
def test_shards_without_an_index_that_are_not_whole(copy: Path, files: dict[str, slice], message: str) -> None:
    _divide(copy, files)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(copy))


def _index(folder: Path, file: str, tied: bool, extra: str) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors.pop("lm_head.weight")
    (folder / WEIGHTS_NAME).unlink()
    save_file(tensors, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, extra], file)}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))


def test_a_stale_entry_of_a_tied_head_is_passed_over(copy: Path) -> None:
    _index(copy, _shard(1, 1), True, "lm_head.weight")
    assert lower(open_checkpoint(str(copy))).model.tie_embeddings


@pytest.mark.parametrize(("tied", "extra"), [(False, "lm_head.weight"), (True, "model.norm.bias")])
def test_other_stale_entries_are_refused(copy: Path, tied: bool, extra: str) -> None:
    _index(copy, _shard(1, 1), tied, extra)
    with pytest.raises(CheckpointError, match=f"names tensor `{extra}`"):
        open_checkpoint(str(copy))


@pytest.mark.parametrize("file", [WEIGHTS_NAME, "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_named(copy: Path, file: str) -> None:
    (copy / file).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"{file}` is a git-lfs pointer") as caught:
        checkpoint = open_checkpoint(str(copy))
        for name in checkpoint.companion_files():
            checkpoint.file_bytes(name)
    assert "git lfs pull" in str(caught.value.hint)


def test_an_index_that_is_a_pointer_is_named(copy: Path) -> None:
    (copy / WEIGHTS_NAME).unlink()
    (copy / INDEX_NAME).write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"index.json` is a git-lfs pointer"):
        open_checkpoint(str(copy))


def test_a_folder_whose_name_is_not_utf8_has_a_name(folder: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/model\xff"
    shutil.copytree(os.fsencode(folder), odd)
    assert open_checkpoint(os.fsdecode(odd)).name == "model\ufffd"
