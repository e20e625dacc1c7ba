"""A GGUF file as a Checkpoint: settings, tokenizer and tensors by the names of a Hugging Face folder.

The small files that a bundle copies lie in a folder of the user's cache. The weights stay in the GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moec.manifests.errors import CheckpointError

from ...workspace.durable import Disk, disk_errors
from ..checkpoint import Checkpoint
from ..model_files import CONFIG_NAME
from ..packed_weights import LayoutError, PackedWeight
from ..weight_files import TensorRef
from .blocks import BLOCKS, PLAIN, block_weight
from .header import SUFFIX, GgufHead, StoredTensor, read_head
from .names import Piece, Undo, pieces
from .settings import config_of
from .tokenizer_files import TEMPLATE_NAME, tokenizer_files

CACHE = Path(".cache") / "moec" / "gguf"
"""Below the home folder; holds one folder for each file."""
_END_KEYS = ("eos", "eot", "eom")
_HALF_TYPES = ("F16", "BF16")


def open_gguf(path: Path, cache: Path | None = None) -> Checkpoint:
    """Open a GGUF file, or a set of them by the name of one.

    cache: parent of the folders with small files, by default CACHE of the user.
    Raises CheckpointError. Raises DoesNotFit or MoecError if the disk refuses.
    """
    head = read_head(path)
    config = config_of(head) | _end_tokens(head)
    folder = _write_small_files(head, config, cache)
    architecture = str(head.metadata["general.architecture"])
    plain_type = _float_type(head)
    tensors, parts = dict[str, TensorRef](), dict[str, TensorRef]()
    packed = dict[str, PackedWeight]()
    for name, piece in pieces(architecture, head.tensors):
        try:
            ref, weight = _piece(name, piece, head.tensors[piece.stored], config, plain_type)
        except LayoutError as error:
            raise CheckpointError(f"`{path}`, `{piece.stored}`: {error}", "convert it to another type") from error
        if weight is None:
            tensors[name] = ref
            continue
        parts[name], packed[name] = ref, weight
        tensors[name] = TensorRef(ref.file, plain_type, weight.shape, 0, 0)
    kinds = Counter(weight.precision for weight in packed.values())
    precision = ", ".join(kind for kind, _ in kinds.most_common())
    return Checkpoint(folder, path.name.removesuffix(SUFFIX), config, {}, tensors, packed, parts, precision)


def _piece(
    name: str, piece: Piece, stored: StoredTensor, config: Mapping[str, Any], plain_type: str
) -> tuple[TensorRef, PackedWeight | None]:
    """Return the place of a tensor, and how to decode it; None if it is stored as it is. Raises LayoutError."""
    shape, offset, size = stored.shape, stored.offset_bytes, stored.size_bytes
    if piece.expert is not None:
        size //= shape[0]
        shape, offset = shape[1:], offset + piece.expert * size
    file = os.fspath(stored.file.absolute())
    if stored.kind in PLAIN:
        ref = TensorRef(file, PLAIN[stored.kind], shape, offset, size)
        if piece.undo is None:
            return ref, None
        weight = PackedWeight({BLOCKS: name}, shape, stored.kind, lambda parts: parts[BLOCKS])
    else:
        rows = 1
        for extent in shape[:-1]:
            rows *= extent
        ref = TensorRef(file, "U8", (rows, size // rows), offset, size)
        weight = block_weight(name, shape, stored.kind)
    return ref, weight if piece.undo is None else _undone(weight, piece.undo, config)


def _undone(weight: PackedWeight, undo: Undo, config: Mapping[str, Any]) -> PackedWeight:
    """Return a weight whose values are changed after they are decoded."""
    shape = tuple(undo(torch.empty(weight.shape, device="meta"), config).shape)
    return PackedWeight(weight.names, shape, weight.precision, lambda parts: undo(weight.decode(parts), config))


def _float_type(head: GgufHead) -> str:
    """Return the 16-bit type of the weights: that of most 16-bit tensors, else float16 if there are blocks.

    float16 holds the values of blocks with float16 scales to 2^-11, bfloat16 to 2^-8.
    """
    sizes = Counter[str]()
    for tensor in head.tensors.values():
        sizes[tensor.kind] += tensor.size_bytes
    usual = "F16" if sizes.keys() - PLAIN.keys() else "BF16"
    return max(_HALF_TYPES, key=lambda kind: (sizes[kind], kind == usual))


def _end_tokens(head: GgufHead) -> dict[str, Any]:
    """Return the tokens that end a text or a turn, as config.json names them."""
    found = [head.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
    return {"eos_token_id": list(dict.fromkeys(number for number in found if type(number) is int))}


def _write_small_files(head: GgufHead, config: Mapping[str, Any], cache: Path | None) -> Path:
    """Write config.json and the tokenizer's files, and return their folder. Equal files are left alone."""
    files = {CONFIG_NAME: json.dumps(config, indent=1).encode() + b"\n", **tokenizer_files(head)}
    digest = hashlib.sha256(os.fsencode(head.path.absolute()))
    parent = Path.home() / CACHE if cache is None else cache
    folder, disk = parent / f"{head.path.stem[:60]}-{digest.hexdigest()[:16]}", Disk()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if TEMPLATE_NAME not in files:
            (folder / TEMPLATE_NAME).unlink(missing_ok=True)
        for name, content in files.items():
            if not (folder / name).is_file() or (folder / name).read_bytes() != content:
                disk.write_file(folder / name, content)
    return folder
