"""A GGUF file as a Checkpoint: settings, tokenizer and tensors by the names of a Hugging Face folder.

The small files that a bundle copies lie in a folder of the user's cache. The weights stay in the GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moec.manifests.errors import CheckpointError

from ...workspace.durable import Disk, disk_errors
from ..checkpoint import Checkpoint
from ..integer_codes import Parts
from ..model_files import CONFIG_NAME
from ..packed_weights import LayoutError, PackedWeight
from ..weight_files import TensorRef
from .blocks import BLOCKS, MXFP4, PLAIN, block_weight
from .header import SUFFIX, GgufHead, StoredTensor, read_head
from .names import Piece, pieces
from .settings import config_of
from .tokenizer_files import TEMPLATE_NAME, tokenizer_files
from .undo import Undo

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
            found = [_stored(piece, head.tensors[stored], name) for stored in piece.stored]
            weight = _undone(name, piece.undo, found, config) if piece.undo else found[0].weight
        except LayoutError as error:
            raise CheckpointError(f"`{path}`, `{piece.stored[0]}`: {error}", "convert it to another type") from error
        if weight is None:
            tensors[name] = found[0].ref
            continue
        parts |= {on_disk: part.ref for on_disk, part in zip(weight.names.values(), found, strict=True)}
        packed[name] = weight
        tensors[name] = TensorRef(found[0].ref.file, plain_type, weight.shape, 0, 0)
    kinds = Counter(weight.precision for weight in packed.values() if weight.precision not in PLAIN)
    precision = ", ".join(kind for kind, _ in kinds.most_common())
    return Checkpoint(folder, path.name.removesuffix(SUFFIX), config, {}, tensors, packed, parts, precision)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file or one matrix of it. weight: how to decode it; None: it is stored as it is."""

    ref: TensorRef
    shape: tuple[int, ...]
    weight: PackedWeight | None


def _stored(piece: Piece, stored: StoredTensor, name: str) -> _Stored:
    """Return where the bytes of a piece lie, and how to decode them. Raises LayoutError."""
    shape, offset, size = stored.shape, stored.offset_bytes, stored.size_bytes
    for at in () if piece.expert is None else (piece.expert,):
        size //= shape[0]
        shape, offset = shape[1:], offset + at * size
    for half in () if piece.half is None else (piece.half,):
        if len(shape) != 2 or shape[0] % 2:
            raise LayoutError(f"expected matrices with an even number of rows, found {list(stored.shape)}")
        size //= 2
        shape, offset = (shape[0] // 2, shape[1]), offset + half * size
    file = os.fspath(stored.file.absolute())
    if stored.kind in PLAIN:
        return _Stored(TensorRef(file, PLAIN[stored.kind], shape, offset, size), shape, None)
    rows = math.prod(shape[:-1])
    return _Stored(
        TensorRef(file, "U8", (rows, size // rows), offset, size), shape, block_weight(name, shape, stored.kind)
    )


def _undone(name: str, undo: Undo, found: Sequence[_Stored], config: Mapping[str, Any]) -> PackedWeight:
    """Return a weight that is computed from others after they are decoded. Raises LayoutError."""
    names = {str(at): f"{name} {at}" for at in range(len(found))}

    def decoded(parts: Parts) -> Tensor:
        weights = [
            parts[str(at)] if part.weight is None else part.weight.decode({BLOCKS: parts[str(at)]})
            for at, part in enumerate(found)
        ]
        return undo(config, *(weight.reshape(part.shape).float() for weight, part in zip(weights, found, strict=True)))

    try:
        shape = undo(config, *(torch.empty(part.shape, device="meta") for part in found)).shape
    except (RuntimeError, ZeroDivisionError) as error:
        shapes = " and ".join(str(list(part.shape)) for part in found)
        raise LayoutError(f"expected shapes that its settings allow, found {shapes}") from error
    kinds = [part.ref.dtype if part.weight is None else part.weight.precision for part in found]
    return PackedWeight(names, tuple(shape), kinds[0], decoded)


def _float_type(head: GgufHead) -> str:
    """Return the 16-bit type of the weights: that of most 16-bit tensors, else float16 if there are blocks.

    float16 holds the values of blocks with float16 scales to 2^-11, bfloat16 to 2^-8. It holds those of MXFP4 exactly.
    """
    sizes = Counter[str]()
    for tensor in head.tensors.values():
        sizes[tensor.kind] += tensor.size_bytes
    usual = "BF16" if MXFP4 in sizes or not sizes.keys() - PLAIN.keys() else "F16"
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
