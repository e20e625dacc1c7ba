"""Open a model: a Hugging Face folder, a folder at a URL, a model on the hub, or a GGUF file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.errors import CheckpointError
from moec.manifests.files.limits import MAX_CONFIG_BYTES

from .checkpoint import COMPANION_PATTERNS, FLOAT_DTYPES, PACKED_DTYPES, Checkpoint
from .gguf.header import is_gguf
from .gguf.open_gguf import open_gguf
from .locate import locate
from .mlx import is_mlx, mlx_tensors
from .model_files import CONFIG_NAME, GENERATION_CONFIG_NAME
from .packed_tensors import METHODS, find_packed
from .packed_weights import LayoutError, PackedWeight
from .text_part import has_text_part, text_part
from .weight_files import BLOCKS_SUFFIX, INDEX_NAME, SCALES_SUFFIX, TensorRef, read_json, read_tensors

EARLY_LABEL_NAME = "quantize_config.json"
"""Label of GPTQ's early tools."""
_PATTERNS = ("*.safetensors", INDEX_NAME, EARLY_LABEL_NAME, *COMPANION_PATTERNS)
"""Files of a model that are copied from a URL or a hub."""
_NO_CONFIG = "a Hugging Face model folder has one; is this one?"


def open_checkpoint(path: str) -> Checkpoint:
    """Open a local model folder, a GGUF file, a folder at an fsspec URL, or a hub id if there is a network.

    Raises CheckpointError, which names the file, if
    * the path is not a folder;
    * config.json is missing or damaged;
    * there are no safetensors weights, or they are damaged or truncated;
    * the index does not match its shards;
    * a dtype is not bfloat16, float16 or float32.
    """
    if is_gguf(path):
        return open_gguf(Path(path).expanduser())
    root, name = locate(path, _PATTERNS)
    inner = sorted([*root.glob(f"*/{CONFIG_NAME}"), *root.glob(f"snapshots/*/{CONFIG_NAME}")])
    remedy = f"name the model folder, like `{inner[0].parent}`" if inner else _NO_CONFIG
    config = read_json(root / CONFIG_NAME, MAX_CONFIG_BYTES, remedy)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"`{root / CONFIG_NAME}` has no `model_type`, expected the name of a model family",
            "use the config.json that came with the weights",
        )
    generation = root / GENERATION_CONFIG_NAME
    generation_config = dict[str, Any]()
    if os.path.lexists(generation):
        generation_config = read_json(generation, MAX_CONFIG_BYTES, "remove or repair it")
    # transformers ties the output matrix to the embedding, and passes over a stale entry for it.
    is_tied = config.get("tie_word_embeddings") is not False

    def may_lack(tensor: str) -> bool:
        return is_tied and tensor == "lm_head.weight"

    tensors: Mapping[str, TensorRef] = read_tensors(root, may_lack)
    notes: tuple[str, ...] = ()
    if has_text_part(config):
        config, tensors, notes = text_part(config, tensors)
    opened = _with_decoded(Checkpoint(root, name, config, generation_config, tensors, notes=notes))
    tensors = opened.tensors
    wrong = sorted(n for n, ref in tensors.items() if ref.dtype not in FLOAT_DTYPES and not _is_packed(n, ref))
    if wrong:
        raise CheckpointError(
            f"`{root}`: {len(wrong)} tensors are neither bfloat16, float16 nor float32, first `{wrong[0]}` with "
            f"{tensors[wrong[0]].dtype}",
            "start from the checkpoint before it was quantized",
        )
    if any(_is_packed(name, ref) for name, ref in tensors.items()):
        return replace(opened, precision=", ".join(filter(None, (opened.precision, "MXFP4"))))
    return opened


def _with_decoded(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its quantized weights as if they were not.

    Tensors decide which weights are quantized. A label tells details of a layout at most. Raises CheckpointError.
    """
    if is_mlx(checkpoint.config, checkpoint.tensors):
        return _with_mlx(checkpoint)
    label, place = checkpoint.config.get("quantization_config"), checkpoint.root / CONFIG_NAME
    if label is None and os.path.lexists(checkpoint.root / EARLY_LABEL_NAME):
        place = checkpoint.root / EARLY_LABEL_NAME
        label = read_json(place, MAX_CONFIG_BYTES, "remove or repair it")
    method = label.get("quant_method") if isinstance(label, dict) else label
    has_blocks = any(_is_packed(name, ref) for name, ref in checkpoint.tensors.items())
    if method == "mxfp4" and has_blocks:
        return checkpoint
    try:
        packed = find_packed(checkpoint.tensors, label if isinstance(label, dict) else {}, checkpoint.tensor)
    except LayoutError as error:
        raise CheckpointError(
            f"`{checkpoint.root}`, {error}", "start from the checkpoint before it was quantized"
        ) from error
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    if not packed.weights:
        if label is None:
            return checkpoint
        if any(ref.dtype not in FLOAT_DTYPES and not _is_packed(n, ref) for n, ref in checkpoint.tensors.items()):
            raise CheckpointError(
                f"`{place}` has the quantization method `{str(method)[:80]}`, expected tensors in the layout of "
                f"{', '.join(METHODS)} or mxfp4",
                "start from the checkpoint before it was quantized",
            )
        if has_blocks:
            return replace(checkpoint, config=config)
        note = (
            f"`{place}` names the quantization method `{str(method)[:80]}`, but no tensor is quantized: it is ignored"
        )
        return replace(checkpoint, config=config, notes=(*checkpoint.notes, note))
    plain = {name: ref for name, ref in checkpoint.tensors.items() if name not in packed.parts}
    parts = {name: checkpoint.tensors[name] for name in packed.parts}
    float_types = Counter(ref.dtype for ref in plain.values() if ref.dtype in ("BF16", "F16"))
    dtype = float_types.most_common(1)[0][0] if float_types else "BF16"
    return replace(
        checkpoint,
        config=config,
        tensors={**plain, **_decoded(packed.weights, parts, dtype)},
        packed=packed.weights,
        parts=parts,
        precision=packed.precision(),
    )


def _with_mlx(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the weights of mlx-lm as if they were not quantized. Raises CheckpointError."""
    try:
        found = mlx_tensors(checkpoint.config, checkpoint.tensors)
    except LayoutError as error:
        raise CheckpointError(f"`{checkpoint.root}`: {error}", "start from the checkpoint before mlx-lm") from error
    left_out = ("quantization", "quantization_config")
    config = {name: value for name, value in checkpoint.config.items() if name not in left_out}
    kinds = Counter(weight.precision for weight in found.weights.values())
    precision = ", ".join(kind for kind, _ in kinds.most_common())
    dtype = Counter(ref.dtype for ref in found.plain.values() if ref.dtype in ("BF16", "F16")).most_common(1)
    return replace(
        checkpoint,
        config=config,
        tensors={**found.plain, **_decoded(found.weights, found.parts, dtype[0][0] if dtype else "BF16")},
        packed=found.weights,
        parts=found.parts,
        precision=precision,
    )


def _decoded(weights: Mapping[str, PackedWeight], parts: Mapping[str, TensorRef], dtype: str) -> dict[str, TensorRef]:
    """Return quantized weights as if they were not."""
    return {
        name: TensorRef(parts[next(iter(weight.names.values()))].file, dtype, weight.shape, 0, 0)
        for name, weight in weights.items()
    }


def _is_packed(name: str, ref: TensorRef) -> bool:
    return ref.dtype in PACKED_DTYPES and name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX))
