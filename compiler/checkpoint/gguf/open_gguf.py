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
_END_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<turn|>",
        "<|end_of_text|>", "[e~[",
    )
)  # fmt: skip
"""Tokens that end a text or a turn in every vocabulary that has them. Source: llama.cpp, llama-vocab.cpp."""
_HALF_TYPES = ("F16", "BF16")


def open_gguf(path: Path, cache: Path | None = None) -> Checkpoint:
    """Open a GGUF file, or a set of them by the name of one.

    cache: parent of the folders with small files, by default CACHE of the user.
    Raises CheckpointError. Raises DoesNotFit or MoecError if the disk refuses.
    """
    head = read_head(path)
    config = config_of(head) | end_tokens(head)
    folder = _write_small_files(head, config, cache)
    architecture = str(head.metadata["general.architecture"])
    plain_type = _float_type(head)
    tensors, parts = dict[str, TensorRef](), dict[str, TensorRef]()
    packed = dict[str, PackedWeight]()
    _check_stacks(head, architecture)
    for name, piece in pieces(architecture, head.tensors):
        if name in tensors:
            raise CheckpointError(f"`{path}` holds `{piece.stored[0]}` in two ways", "convert the model again")
        try:
            found = [_stored(piece, head.tensors[stored], name) for stored in piece.stored]
            weight = found[0].weight if piece.undo is None else _undone(name, piece.undo, found, config)
        except LayoutError as error:
            raise CheckpointError(f"`{path}`, `{piece.stored[0]}`: {error}", "convert it to another type") from error
        ref = found[0].ref
        if weight is None and ref.dtype in ("F32", plain_type):
            tensors[name] = ref
            continue
        if weight is None:  # a 16-bit type that is not that of most
            weight = PackedWeight({BLOCKS: name}, ref.shape, ref.dtype, lambda parts: parts[BLOCKS], by_rows=True)
        parts |= {on_disk: part.ref for on_disk, part in zip(weight.names.values(), found, strict=True)}
        packed[name] = weight
        has_singles = all(part.ref.dtype == "F32" for part in found)
        tensors[name] = TensorRef(ref.file, "F32" if has_singles else plain_type, weight.shape, 0, 0)
    kinds = Counter(weight.precision for weight in packed.values() if weight.precision not in PLAIN)
    precision = ", ".join(kind for kind, _ in kinds.most_common())
    name = path.name.removesuffix(SUFFIX)
    return Checkpoint(folder, name, config, {}, tensors, packed, parts, precision, stored_in=head.path)


def _check_stacks(head: GgufHead, architecture: str) -> None:
    """Refuse stacks that do not hold one matrix for each expert."""
    experts = head.metadata[f"{architecture}.expert_count"]
    for name, tensor in head.tensors.items():
        if name.endswith("_exps.weight") and (len(tensor.shape) != 3 or tensor.shape[0] != experts):
            raise CheckpointError(
                f"`{head.path}`, `{name}`: expected a stack of {experts} matrices, found {list(tensor.shape)}",
                "copy the file again",
            )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file or one matrix of it. weight: how to decode it; None: it is stored as it is."""

    ref: TensorRef
    shape: tuple[int, ...]
    weight: PackedWeight | None


def _stored(piece: Piece, stored: StoredTensor, name: str) -> _Stored:
    """Return where the bytes of a piece lie, and how to decode them. Raises LayoutError."""
    shape, offset, size = stored.shape, stored.offset_bytes, stored.size_bytes
    if piece.expert is not None:
        size //= shape[0]
        shape, offset = shape[1:], offset + piece.expert * size
    if piece.half is not None:
        if len(shape) != 2 or shape[0] % 2:
            raise LayoutError(f"expected matrices with an even number of rows, found {list(stored.shape)}")
        size //= 2
        shape, offset = (shape[0] // 2, shape[1]), offset + piece.half * size
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
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
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


def end_tokens(head: GgufHead) -> dict[str, Any]:
    """Return the tokens that end a text or a turn, as config.json names them. Some are known by their text alone."""
    metadata, tokens = head.metadata, head.metadata.get("tokenizer.ggml.tokens")
    listed = metadata.get("tokenizer.ggml.eos_token_ids", [])
    found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
    found += listed if isinstance(listed, list) else []
    if isinstance(tokens, list):
        found += [number for number, text in enumerate(tokens) if text in _END_TEXTS]
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
