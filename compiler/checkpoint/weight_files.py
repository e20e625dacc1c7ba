"""The weight files of a model folder: which tensors they hold, and where. Only headers are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor on disk.

    file: its file in the folder.
    dtype: the name of its type in the file.
    shape: its shape.
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
        return read_input(path, limit_bytes, follow_links=True)
    except UnreadableFile as error:
        if not os.path.lexists(path):
            raise CheckpointError(f"no `{path.name}` in `{path.parent}`", remedy) from error
        raise CheckpointError(f"`{path}` {error}", remedy) from error


def read_json(path: Path, limit_bytes: int, remedy: str) -> dict[str, Any]:
    """Read a JSON object from a small file. Raises CheckpointError."""
    try:
        plain = load_strict_json(read_file(path, limit_bytes, remedy), COMPANION_JSON)
    except ValueError as error:
        raise CheckpointError(f"`{path}` is not JSON: {error}", remedy) from error
    if not isinstance(plain, dict):
        raise CheckpointError(f"`{path}`: expected a JSON object, found {type(plain).__name__}", remedy)
    return plain


def read_tensors(root: Path) -> dict[str, TensorRef]:
    """Return all tensors of the folder. Only headers are read. Raises CheckpointError."""
    if (root / WEIGHTS_NAME).is_file():
        return _refs(WEIGHTS_NAME, _header(root / WEIGHTS_NAME))
    if (root / INDEX_NAME).is_file():
        return _read_sharded(root, read_json(root / INDEX_NAME, MAX_INDEX_BYTES, "copy the index again"))
    pickles = sorted(path.name for path in root.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"`{root}` holds pickled weights only (`{pickles[0]}`), expected `{WEIGHTS_NAME}`",
            "load and save the model with transformers, which writes safetensors",
        )
    raise CheckpointError(
        f"`{root}` has neither `{WEIGHTS_NAME}` nor `{INDEX_NAME}`", "name a folder that holds safetensors weights"
    )


def _read_sharded(root: Path, index: dict[str, Any]) -> dict[str, TensorRef]:
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
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for name, ref in _refs(file, _header(root / file)).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor `{name}` lies in both `{root / tensors[name].file}` and `{file}`", "keep one of them"
                )
            tensors[name] = ref
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"`{place}` names tensor `{name}` in `{file}`, which does not hold it", "copy index and weights again"
            )
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
        raise CheckpointError(
            f"`{path}` is damaged or truncated: {error}", "copy the file again and compare its size with the source"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error
