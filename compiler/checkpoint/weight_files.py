"""The weight files of a model folder: which tensors they hold, and where. Only headers are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.manifests.errors import CheckpointError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import COMPANION_JSON, MAX_INDEX_BYTES
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.safetensors_header import HeaderError, TensorEntry, read_header

from .url import PLAIN_NAME

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MXFP4_BLOCK_VALUES = 32
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Ends of the names of both tensors of a stack in MXFP4."""
_SHARD = re.compile(r"(?P<set>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LFS_REMEDY = "run `git lfs pull` in the folder"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor on disk.

    file: its file in the folder.
    dtype: the name of its type in the file.
    offset_bytes, size_bytes: its place in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def read_file(path: Path, limit_bytes: int, remedy: str) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Links are followed, because hub caches consist of them. Raises CheckpointError.
    """
    try:
        data = read_input(path, limit_bytes, follow_links=True)
    except UnreadableFile as error:
        if not os.path.lexists(path):
            raise CheckpointError(f"no `{path.name}` in `{path.parent}`", remedy) from error
        raise CheckpointError(f"`{path}` {error}", remedy) from error
    if data.startswith(_LFS_POINTER):
        raise CheckpointError(f"`{path}` is a git-lfs pointer, expected the file itself", _LFS_REMEDY)
    return data


def read_json(path: Path, limit_bytes: int, remedy: str) -> dict[str, Any]:
    """Read a JSON object from a small file. Raises CheckpointError."""
    try:
        plain = load_strict_json(read_file(path, limit_bytes, remedy), COMPANION_JSON)
    except ValueError as error:
        raise CheckpointError(f"`{path}` is not JSON: {error}", remedy) from error
    if not isinstance(plain, dict):
        raise CheckpointError(f"`{path}`: expected a JSON object, found {type(plain).__name__}", remedy)
    return plain


def read_tensors(root: Path, may_lack: Callable[[str], bool] = lambda name: False) -> dict[str, TensorRef]:
    """Return all tensors of the folder. Only headers are read.

    may_lack: returns whether an index may name a tensor that no shard holds.
    Raises CheckpointError.
    """
    if (root / WEIGHTS_NAME).is_file():
        return _refs(WEIGHTS_NAME, _header(root / WEIGHTS_NAME))
    if (root / INDEX_NAME).is_file():
        return _read_sharded(root, read_json(root / INDEX_NAME, MAX_INDEX_BYTES, "copy the index again"), may_lack)
    shards = sorted(path.name for path in root.glob("*.safetensors") if _SHARD.fullmatch(path.name))
    if shards:
        return _read_without_index(root, shards)
    pickles = sorted(path.name for path in root.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"`{root}` holds pickled weights only (`{pickles[0]}`), expected `{WEIGHTS_NAME}`",
            "load and save the model with transformers, which writes safetensors",
        )
    for path in (root / WEIGHTS_NAME, root / INDEX_NAME):
        if path.is_symlink():
            raise CheckpointError(f"`{path}` is a link to a missing file", "download the model again")
    raise CheckpointError(
        f"`{root}` has neither `{WEIGHTS_NAME}` nor `{INDEX_NAME}`", "name a folder that holds safetensors weights"
    )


def _read_sharded(root: Path, index: dict[str, Any], may_lack: Callable[[str], bool]) -> dict[str, TensorRef]:
    """Return the tensors of all shards. Index and shards must name the same tensors. Raises CheckpointError."""
    place = root / INDEX_NAME
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{place}` has no `weight_map`, expected tensor names and files", "copy the index again")
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        if not PLAIN_NAME.fullmatch(file):
            raise CheckpointError(f"`{place}` names `{file[:80]}`, expected a plain file name", "copy the index again")
    missing = [file for file in files if not (root / file).is_file()]
    if missing:
        raise CheckpointError(
            f"`{root}` lacks {len(missing)} of {len(files)} weight files that its index names, first `{missing[0]}`",
            "copy the missing files",
        )
    tensors = _tensors_of(root, files)
    for name, file in weight_map.items():
        if name not in tensors and may_lack(name):
            continue
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"`{place}` names tensor `{name}` in `{file}`, which does not hold it", "copy index and weights again"
            )
    return tensors


def _read_without_index(root: Path, shards: list[str]) -> dict[str, TensorRef]:
    """Return the tensors of a whole set of shards that has no index. Raises CheckpointError."""
    parts = [match for match in map(_SHARD.fullmatch, shards) if match is not None]
    sets = sorted({f"{shard['set']}-*-of-{shard['count']}" for shard in parts})
    if len(sets) > 1:
        named = ", ".join(f"`{name}`" for name in sets)
        raise CheckpointError(
            f"`{root}` has no `{INDEX_NAME}`, and shards of {len(sets)} sets ({named})",
            "keep the shards of one set, or copy the index",
        )
    missing = int(parts[0]["count"]) - len({int(shard["number"]) for shard in parts})
    if missing:
        raise CheckpointError(
            f"`{root}` has no `{INDEX_NAME}`, and lacks {missing} of the {parts[0]['count']} shards of `{sets[0]}`",
            "copy the missing shards and the index",
        )
    return _tensors_of(root, shards)


def _tensors_of(root: Path, files: list[str]) -> dict[str, TensorRef]:
    """Return the tensors of some files. Raises CheckpointError for a tensor that lies in two of them."""
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for name, ref in _refs(file, _header(root / file)).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor `{name}` lies in both `{root / tensors[name].file}` and `{file}`", "keep one of them"
                )
            tensors[name] = ref
    return tensors


def _refs(file: str, header: Mapping[str, TensorEntry]) -> dict[str, TensorRef]:
    return {
        name: TensorRef(file, entry.dtype, entry.shape, entry.offset_bytes, entry.size_bytes)
        for name, entry in header.items()
    }


def _header(path: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(path)
    except HeaderError as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
        if is_pointer:
            raise CheckpointError(f"`{path}` is a git-lfs pointer, expected the file itself", _LFS_REMEDY) from error
        raise CheckpointError(
            f"`{path}` is damaged or truncated: {error}", "copy the file again and compare its size with the source"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error
