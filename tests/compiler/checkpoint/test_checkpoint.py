"""Opening model folders: the content read, folders that tools leave incomplete, and one clear error for each fault."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.checkpoint import INDEX_NAME, WEIGHTS_NAME
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.manifests.errors import CheckpointError
from tests.compiler.lowered import lowered
from tests.tiny_models import TINY_MODELS, save_tiny_mixtral

ROUTER = "model.layers.1.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixtral(tmp_path_factory.mktemp("checkpoint") / "tiny-shards", TINY_MODELS["sharded-half"])


@pytest.fixture
def copy_of_shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def test_every_tensor_is_read_as_it_lies_on_disk(folder: Path) -> None:
    checkpoint, expected = open_checkpoint(str(folder)), load_file(folder / WEIGHTS_NAME)
    assert checkpoint.name == "tiny"
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        read = checkpoint.tensor(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_shards_are_one_mapping(sharded: Path) -> None:
    checkpoint = open_checkpoint(str(sharded))
    assert len(checkpoint.weight_files()) > 1
    for file in checkpoint.weight_files():
        for name, tensor in load_file(sharded / file).items():
            assert torch.equal(checkpoint.tensor(name), tensor)


def test_a_slice_of_a_stack_is_read_alone(copy: Path) -> None:
    stack = torch.randn(3, 8, 4).bfloat16()
    save_file({"stack": stack}, copy / WEIGHTS_NAME)
    checkpoint = open_checkpoint(str(copy))
    assert torch.equal(checkpoint.tensor("stack", 2), stack[2])
    assert torch.equal(checkpoint.tensor("stack", 1, (2, 5)), stack[1, 2:5])
    assert torch.equal(checkpoint.tensor("stack", rows=(1, 3)), stack[1:3])


def test_source_files_name_everything_the_model_consists_of(sharded: Path) -> None:
    entries = {entry.name: entry for entry in open_checkpoint(str(sharded)).source_files()}
    assert {"config.json", "generation_config.json", "tokenizer.json", INDEX_NAME} <= set(entries)
    assert set(entries) == {path.name for path in sharded.iterdir()}
    for name, entry in entries.items():
        data = (sharded / name).read_bytes()
        assert (entry.size_bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def _refused(path: Path | str, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    assert caught.value.hint
    for part in parts:
        assert part in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    _refused(tmp_path / "absent", "no folder", "absent")
    (tmp_path / "file").write_text("x")
    _refused(tmp_path / "file", "is a file, expected a model folder")


def test_a_hub_id_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    _refused("nobody-here/no-such-model", "no folder `nobody-here/no-such-model` here, and the hub gave no model")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda folder: (folder / "config.json").unlink(), ["no `config.json` in"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json` is not JSON"]),
        (lambda folder: (folder / "config.json").write_text("[1]"), ["expected a JSON object, found list"]),
        (lambda folder: (folder / "config.json").write_text('{"a": 1}'), ["has no `model_type`"]),
        (lambda folder: (folder / "generation_config.json").write_text("x"), ["generation_config.json` is not JSON"]),
        (lambda folder: (folder / WEIGHTS_NAME).unlink(), ["has neither `model.safetensors` nor"]),
        (lambda folder: (folder / WEIGHTS_NAME).write_bytes(b"abc"), ["model.safetensors` is damaged", "3 bytes"]),
    ],
)
def test_damaged_folders(copy: Path, change: Callable[[Path], object], parts: list[str]) -> None:
    change(copy)
    _refused(copy, *parts)


def test_a_folder_around_the_model_names_the_model_folder(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(folder, snapshot)
    for place in (snapshot.parent, snapshot.parent.parent):
        with pytest.raises(CheckpointError, match=r"no `config\.json` in") as caught:
            open_checkpoint(str(place))
        assert caught.value.hint == f"name the model folder, like `{snapshot}`"


@pytest.mark.parametrize("file", [WEIGHTS_NAME, INDEX_NAME])
def test_weights_that_a_cache_has_lost_are_named(copy: Path, file: str) -> None:
    (copy / WEIGHTS_NAME).unlink()
    (copy / file).symlink_to("../../blobs/0123")
    _refused(copy, f"{file}` is a link to a missing file", "download the model again")


def test_pickled_weights_are_refused(copy: Path) -> None:
    (copy / WEIGHTS_NAME).rename(copy / "pytorch_model.bin")
    _refused(copy, "pickled weights only (`pytorch_model.bin`)", "safetensors")


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_truncated_file_is_named(copy: Path, kept: int) -> None:
    data = (copy / WEIGHTS_NAME).read_bytes()
    (copy / WEIGHTS_NAME).write_bytes(data[:kept])
    _refused(copy, "model.safetensors` is damaged or truncated")


def test_a_file_that_shrinks_after_opening_is_named(copy: Path) -> None:
    checkpoint = open_checkpoint(str(copy))
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].offset_bytes)
    (copy / WEIGHTS_NAME).write_bytes((copy / WEIGHTS_NAME).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"ends inside tensor `{last}`"):
        checkpoint.tensor(last)


def test_types_without_sixteen_bit_values_are_refused(copy: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int8)}, copy / WEIGHTS_NAME)
    _refused(copy, "1 tensors are neither bfloat16, float16 nor float32, first `b` with I8")


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_a_missing_shard_is_named(copy_of_shards: Path) -> None:
    file = sorted(copy_of_shards.glob("model-*.safetensors"))[1]
    file.unlink()
    _refused(copy_of_shards, "lacks 1 of", file.name)


def test_a_tensor_that_its_shard_does_not_hold(copy_of_shards: Path) -> None:
    _edit_index(copy_of_shards, lambda weights: weights.update(extra=next(iter(weights.values()))))
    _refused(copy_of_shards, "names tensor `extra` in `model-00001-of-")


def test_a_tensor_in_two_shards(copy_of_shards: Path) -> None:
    files = sorted(copy_of_shards.glob("model-*.safetensors"))
    twice = load_file(files[0])
    save_file(twice, files[1])
    _refused(copy_of_shards, f"tensor `{min(twice)}` lies in both", files[1].name)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_leave_the_folder(copy_of_shards: Path, name: str) -> None:
    _edit_index(copy_of_shards, lambda weights: weights.update({ROUTER: name}))
    _refused(copy_of_shards, "expected a plain file name", name)


def test_an_index_without_a_map(copy_of_shards: Path) -> None:
    (copy_of_shards / INDEX_NAME).write_text('{"weight_map": []}')
    _refused(copy_of_shards, "has no `weight_map`")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 4932528312\n"


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
    assert lowered(copy).model.tie_embeddings


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
