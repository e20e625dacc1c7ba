"""A tiny checkpoint, and another that never had some of its experts: the oracle of leaving experts out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from moec.manifests.model import ExpertKey
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

SHAPE = TinyMixtral(layers=3, experts=8, top_k=4, seed=8)
LEFT_OUT: Mapping[int, Sequence[int]] = {0: (1, 4, 7), 1: (0, 1, 2), 2: (3, 5, 6)}
PRUNED = tuple(ExpertKey(layer, expert) for layer, experts in LEFT_OUT.items() for expert in experts)
_EXPERT = re.compile(r"(model\.layers\.(\d+)\.block_sparse_moe\.experts\.)(\d+)(\..*)")


def save_whole(folder: Path) -> Path:
    """All eight experts in each layer."""
    return save_tiny_mixtral(folder, SHAPE)


def save_without(folder: Path) -> Path:
    """The five that stay, numbered anew, and their rows of the routers."""
    save_tiny_mixtral(folder, SHAPE)
    (file,) = folder.glob("*.safetensors")
    kept = {layer: [e for e in range(SHAPE.experts) if e not in out] for layer, out in LEFT_OUT.items()}
    weights = {}
    for name, weight in load_file(file).items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            own = kept[int(match[2])]
            if int(match[3]) in own:
                weights[f"{match[1]}{own.index(int(match[3]))}{match[4]}"] = weight
        elif name.endswith("block_sparse_moe.gate.weight"):
            weights[name] = weight[kept[int(name.split(".")[2])]].contiguous()
        else:
            weights[name] = weight
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_local_experts"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    return folder
