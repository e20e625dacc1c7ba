"""The names of a bundle's weights in a Hugging Face folder, without the checkpoint that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.weight_files import TensorRef
from ..families import FAMILIES, Lowering

_STACKS = {
    "gpt_oss": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "granitemoe": "model.layers.{layer}.block_sparse_moe.input_linear.weight",
}
"""Families whose published checkpoints have one tensor for all experts of a layer, and its name."""
_CORRECTIONS = {
    "deepseek_v3": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "ernie4_5_moe": "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
    "glm4_moe": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}
_ROW_OF_EXPERTS = frozenset({"ernie4_5_moe"})
"""Families that store the correction as a matrix of one row."""


@dataclass(frozen=True, eq=False)
class _Named(Checkpoint):
    """A checkpoint that has names, and the corrections of scores, but no other weights."""

    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Return a correction."""
        return self.values[name]


def names_of(root: Path, model: ModelSpec, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Lowering:
    """Return where each weight of a bundle lies in a checkpoint of its family.

    root: folder of the bundle, for messages.
    config, generation: config.json and generation_config.json of the bundle.
    Raises OptionError if config.json is not that of the bundle's model.
    """
    values = corrections(model)
    names = [*values, *(_STACKS[model.family].format(layer=at) for at in _routed(model) if model.family in _STACKS)]
    tensors = {name: TensorRef("", "BF16", (), 0, 0) for name in names}
    own_config = {**config, "tie_word_embeddings": model.tie_embeddings}
    lowering = FAMILIES[model.family](_Named(root, root.name, own_config, generation, tensors, values=values))
    if lowering.model != model:
        raise OptionError(f"`{root}`: config.json does not describe the model of moec.json", "copy the bundle again")
    return lowering


def corrections(model: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the score corrections by their names on disk, float32."""
    tensors = dict[str, torch.Tensor]()
    for layer in _routed(model):
        values = model.layers[layer].experts.router.correction
        if values:
            tensor = torch.tensor(values, dtype=torch.float32)
            name = _CORRECTIONS[model.family].format(layer=layer)
            tensors[name] = tensor[None] if model.family in _ROW_OF_EXPERTS else tensor
    return tensors


def _routed(model: ModelSpec) -> list[int]:
    return [layer for layer in range(model.num_layers) if model.layers[layer].experts.count]
