"""Write the weights of a bundle as a Hugging Face folder, so that other tools can repeat what its certificate says."""

from __future__ import annotations

import json
import math
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import OptionError
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.output_file import WRITING_SUFFIX, require_free_bytes
from moec.manifests.model import ExpertKey, ModelSpec, UnitKey
from moec.manifests.progress import Progress

from ..checkpoint.checkpoint import Checkpoint, is_companion
from ..checkpoint.model_files import CONFIG_NAME, GENERATION_CONFIG_NAME
from ..checkpoint.text_part import has_text_part, text_part
from ..checkpoint.weight_files import TensorRef
from ..families import DECODER_NAMES, FAMILIES, Lowering, TensorSource
from ..families.decoder_weights import stated_numbers
from ..workspace.durable import Disk, disk_errors
from ..workspace.work_folder import removed_on_failure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 512 << 20
"""Largest size of a file of weights with more than one tensor. A shard is held in memory."""
PARTIAL_SUFFIX = ".partial"
INDEX_NAME = "model.safetensors.index.json"
_STACKS = {
    "gpt_oss": "mlp.experts.gate_up_proj",
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "granitemoe_swa": "block_sparse_moe.experts.gate_up_proj",
    "granitemoeshared": "block_sparse_moe.input_linear.weight",
    "gemma4_text": "experts.gate_up_proj",
}
"""Families whose published checkpoints have one tensor for all experts of a layer, and its name in the layer."""
_ROW_OF_EXPERTS = frozenset({"ernie4_5_moe"})
"""Families that store the correction as a matrix of one row."""


class Weights(Protocol):
    """Reads the weights of a bundle as float32."""

    def dense(self, name: str) -> np.ndarray:
        """Return a dense weight in its own shape."""
        ...

    def unit(self, key: UnitKey) -> np.ndarray:
        """Return one projection of an expert, [N, K]."""
        ...


@dataclass(frozen=True)
class ExportedBundle:
    """The bundle that is exported.

    path: the folder, for messages.
    files: content of the files that are copied: config, tokenizer, chat template.
    """

    path: Path
    manifest: BundleManifest
    weights: Weights
    files: Mapping[str, bytes]


NEVER = -1e30
"""Bias of an expert that is left out: below every score, and finite in float32 and bfloat16."""
Part = tuple[TensorSource, str | UnitKey]
"""A part of a tensor on disk, and the weight of the bundle that fills it: a dense name, or a projection."""


def export_folder(
    bundle: ExportedBundle, partial: Path, dtype: str, disk: Disk, progress: Progress | None = None
) -> int:
    """Write config, tokenizer, shards and index into the new folder `partial`. Return the bytes of the weights.

    dtype: `float32` holds every value of the bundle exactly.
    Raises InputError if something else stands under its name. On any other error the folder is removed:
    Raises OptionError if the family cannot express an expert that is left out.
    Raises DoesNotFit, MoecError.
    """
    model = bundle.manifest.model
    config = json.loads(bundle.files[CONFIG_NAME])
    config = text_part(config, {})[0] if has_text_part(config) else config
    generation = json.loads(bundle.files.get(GENERATION_CONFIG_NAME, b"{}"))
    lowering = names_of(bundle.path, model, _plain_config(config), generation)
    left_out = {entry.key for entry in bundle.manifest.experts if entry.is_pruned}
    _check_left_out(bundle, lowering, left_out)
    parts = _parts(lowering)
    size = DTYPES[dtype].itemsize
    total = sum(size * math.prod(tensor_parts[0][0].shape) for tensor_parts in parts.values())
    with disk_errors(partial):
        _check_partial(partial)
    with disk_errors(partial), removed_on_failure(disk, partial):
        disk.remove_tree(partial)
        require_free_bytes(partial.parent, total + sum(map(len, bundle.files.values())))
        disk.make_directory(partial)
        tensors = _tensors(bundle, lowering, parts, left_out, DTYPES[dtype])
        written = _write_shards(partial, tensors, len(parts), progress)
        plain_config = {**_plain_config(config), "tie_word_embeddings": model.tie_embeddings, "dtype": dtype}
        plain_config.pop("torch_dtype", None)
        files = {**bundle.files, CONFIG_NAME: _json(plain_config), INDEX_NAME: _json(written)}
        for name, data in files.items():
            disk.write_file(partial / name, data)
        mode = (partial / CONFIG_NAME).stat().st_mode  # the library makes files that only their owner may read
        for path in partial.glob("*.safetensors"):
            path.chmod(stat.S_IMODE(mode))
    return total


def _check_partial(partial: Path) -> None:
    """Raise InputError if an unfinished export is to be removed, and something else stands under its name."""
    names = [path.name for path in partial.iterdir()] if is_implied_folder(partial) else []
    for name in sorted(names):
        written = name.removesuffix(WRITING_SUFFIX)
        if not (written.endswith(".safetensors") or written == INDEX_NAME or is_companion(written)):
            raise OptionError(f"`{partial}` holds `{name}`, which no export has left", "move it, or name another `-o`")


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint that is not quantized."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _check_left_out(bundle: ExportedBundle, lowering: Lowering, left_out: set[ExpertKey]) -> None:
    """Raise OptionError if an expert is left out and its router has no bias."""
    for key in sorted(left_out):
        if not lowering.model.layers[key.layer].experts.router.has_bias:
            raise OptionError(
                f"`{bundle.path}`: {len(left_out)} experts are left out, and a router of {lowering.model.family} has "
                "no bias that could express this",
                "compile with `--keep-experts`",
            )


def _parts(lowering: Lowering) -> dict[str, list[Part]]:
    """Return the parts of each tensor on disk, in the order of the layers."""
    parts = defaultdict[str, list[Part]](list)
    for name, source in lowering.dense.items():
        parts[source.name].append((source, name))
    for key, source in lowering.units.items():
        parts[source.name].append((source, key))
    return dict(parts)


def _tensors(
    bundle: ExportedBundle,
    lowering: Lowering,
    parts: Mapping[str, Sequence[Part]],
    left_out: set[ExpertKey],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors on disk by name, one at a time."""
    for name, tensor_parts in parts.items():
        tensor = torch.zeros(tensor_parts[0][0].shape, dtype=torch.float32)
        for source, weight in tensor_parts:
            if isinstance(weight, UnitKey):
                if ExpertKey(weight.layer, weight.expert) not in left_out:
                    _fill(tensor, source, bundle.weights.unit(weight))
            else:
                _fill(tensor, source, _dense(bundle.weights, weight, left_out))
        limit = torch.finfo(dtype).max
        yield name, tensor.clamp(-limit, limit).to(dtype)
    yield from tables(lowering.model).items()


def _dense(weights: Weights, name: str, left_out: set[ExpertKey]) -> np.ndarray:
    """Return a dense weight. The bias of a router never chooses an expert that is left out."""
    values = weights.dense(name)
    of_layer = [key.expert for key in left_out if name == f"layers.{key.layer}.router_bias"]
    if of_layer:
        values = values.copy()
        values[of_layer] = NEVER
    return values


def _fill(tensor: torch.Tensor, source: TensorSource, weight: np.ndarray) -> None:
    """Copy a weight into its part of a tensor on disk."""
    target = tensor if source.index is None else tensor[source.index]
    target = target if source.rows is None else target[source.rows[0] : source.rows[1]]
    view = source.view(target)
    view.copy_(torch.from_numpy(np.ascontiguousarray(weight)).view(view.shape))


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], count: int, progress: Progress | None
) -> dict[str, Any]:
    """Write tensors into files of at most SHARD_BYTES, and return the index."""
    from safetensors.torch import save_file

    places, shard, shard_bytes, total, files = dict[str, str](), dict[str, torch.Tensor](), 0, 0, 0

    def save() -> None:
        nonlocal files, shard_bytes
        files += 1
        name = f"model-{files:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()
        shard_bytes = 0

    for done, (name, tensor) in enumerate(tensors, 1):
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            save()
        shard[name] = tensor
        shard_bytes += tensor.nbytes
        total += tensor.nbytes
        if progress is not None:
            progress(min(done, count), count)
    save()
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True, eq=False)
class _Named(Checkpoint):
    """A checkpoint that has names, and the numbers that a manifest states, but no other weights."""

    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Return numbers that the manifest states."""
        return self.values[name]


def names_of(root: Path, model: ModelSpec, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Lowering:
    """Return where each weight of a bundle lies in a checkpoint of its family.

    root: folder of the bundle, for messages.
    config, generation: config.json and generation_config.json of the bundle.
    Raises OptionError if config.json is not that of the bundle's model.
    """
    values = tables(model)
    names = list(values)
    if model.family in _STACKS:
        names += [f"model.layers.{layer}.{_STACKS[model.family]}" for layer in _routed(model)]
    if model.family in DECODER_NAMES:
        names += DECODER_NAMES[model.family].renamed_tensors(model.num_layers)
    tensors = {name: TensorRef("", "BF16", (), 0, 0) for name in names}
    own_config = {**config, "tie_word_embeddings": model.tie_embeddings}
    lowering = FAMILIES[model.family](_Named(root, root.name, own_config, generation, tensors, values=values))
    if lowering.model != model:
        raise OptionError(f"`{root}`: config.json does not describe the model of moec.json", "copy the bundle again")
    return lowering


def tables(model: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the numbers that the manifest states by their names on disk, float32."""
    if model.family not in DECODER_NAMES:
        return {}
    tensors = dict[str, torch.Tensor]()
    for name, values in stated_numbers(model, DECODER_NAMES[model.family]).items():
        tensor = torch.tensor(values, dtype=torch.float32)
        tensors[name] = tensor[None] if model.family in _ROW_OF_EXPERTS else tensor
    return tensors


def _routed(model: ModelSpec) -> list[int]:
    return [layer for layer in range(model.num_layers) if model.layers[layer].experts.count]
