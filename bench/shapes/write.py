"""Write a bundle in the shape of a published model, with random weights of 4.5 bits, without a checkpoint on disk.

    python -m bench.shapes.write NAME FOLDER

FOLDER gets `q4`, the bundle, and `checkpoint`, which has the tokenizer alone. NAME is a key of `shapes.json`, whose
settings are those of the published config.json. All matrices have the format q4g64. Every expert has bytes of its own.
All embeddings share a direction, and the outputs of layers are small next to the stream. So half of the experts of
LFM2.5's shape serve 76 % of the reads. OLMoE's, which is trained, serve 75 to 78 % (issue 864 of JustVugg/colibri).
"""

from __future__ import annotations

import argparse
import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.compiler.bundle.emit import BundleContent, emit, finish
from moec.compiler.bundle.publish import publish_directory
from moec.compiler.checkpoint.checkpoint import Checkpoint
from moec.compiler.checkpoint.weight_files import TensorRef
from moec.compiler.families import Lowering, lower
from moec.compiler.preflight.device_fit import summarise_device
from moec.compiler.quantization.packing import pack
from moec.compiler.quantization.quantizers.rtn import rounded_rows
from moec.compiler.request.uniform import uniform_plan
from moec.compiler.workspace.durable import Disk
from moec.manifests.model import UnitKey
from moec.manifests.quant import ROWS_PER_BLOCK, QuantSpec
from moec.profiles.probe import probe_host

from ..yardstick.checkpoint.write import train_tokenizer

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
SPEC = QuantSpec.parse("q4g64")
SHARED_DIRECTION = 0.3  # of the squared length of an embedding
OUTPUT_SCALE = 0.25  # of the output of a mixer or of experts, next to the stream
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "down_proj")


class RandomTensors(Mapping[str, TensorRef]):
    """The tensors of a checkpoint that holds every tensor it is asked for, one by one, except an output matrix.

    shapes: what is known of their shapes.
    """

    def __init__(self, is_stacked: bool) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._is_stacked = is_stacked

    def __contains__(self, name: object) -> bool:
        is_stack = str(name).endswith(("gate_up_proj", "down_proj", "input_linear.weight"))
        is_quantized = str(name).endswith(("_blocks", "_scales"))
        is_copy = name == "lm_head.weight" or str(name).endswith("coder.embed_tokens.weight")
        return (self._is_stacked or not is_stack) and not is_quantized and not is_copy

    def __getitem__(self, name: str) -> TensorRef:
        return TensorRef("random", "BF16", self.shapes.get(name, (1,)), 0, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@functools.lru_cache(maxsize=1)
def _matrix(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the random weights of a matrix or a stack of them, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    weights: Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    if "embed" in name or name == "shared.weight":
        shared = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1)) * SHARED_DIRECTION**0.5
        weights = weights * shape[-1] ** 0.5 * (1 - SHARED_DIRECTION) ** 0.5 + shared
    return weights * OUTPUT_SCALE if name.endswith(_OUTPUTS) else weights


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random weights. Equal names give equal weights."""

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the weights of a name, as if they were on disk."""
        config, tensors = self.config, self.tensors
        assert isinstance(tensors, RandomTensors)
        last = name.removesuffix(".weight").rpartition(".")[2]
        if (size := self._table_size(last)) is not None:
            return torch.full((size,), float(last in ("per_expert_scale", "layer_scalar")))
        shape = tensors.shapes[name]
        if len(shape) == 1 or shape[-1] == 1:
            is_offset = str(config["model_type"]).startswith("qwen3_5") and "linear_attn" not in name
            is_norm = "norm" in name or last == "scale"
            return torch.full(shape, 0.0 if is_offset or not is_norm else 1.0)
        weights = _matrix(name, shape)  # rows of a matrix are asked for one part after the other
        return weights if rows is None else weights[slice(*rows)]

    def _table_size(self, last: str) -> int | None:
        """Return the numbers of a tensor that stands in the manifest, by the last part of its name; None for others."""
        key = {
            "A_log": "linear_num_value_heads", "dt_bias": "linear_num_value_heads", "expert_bias": "num_experts",
            "e_score_correction_bias": "n_routed_experts", "per_expert_scale": "num_experts",
        }.get(last)  # fmt: skip
        return 1 if last == "layer_scalar" else None if key is None else int(self.config[key])


class RandomUnits:
    """Packed units: one random matrix for each shape, whose row blocks are turned for each unit."""

    def __init__(self, plan: Any) -> None:
        self._plan, self._packed = plan, dict[tuple[int, int, float], np.ndarray]()

    def __call__(self, unit: UnitKey, spec: QuantSpec) -> np.ndarray:
        rows, columns = self._plan.model.unit_shape(unit.layer, unit.projection)
        scale = OUTPUT_SCALE if unit.projection == "down" else 1.0
        if (rows, columns, scale) not in self._packed:
            weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * scale * columns**-0.5
            parts = [pack(matrix).reshape(-1) for _, matrix in rounded_rows(weights.bfloat16(), spec)]
            self._packed[rows, columns, scale] = np.concatenate(parts).reshape(-(-rows // ROWS_PER_BLOCK), -1)
        blocks = self._packed[rows, columns, scale]
        return np.roll(blocks, unit.layer * 1031 + unit.expert * 7, axis=0).reshape(-1)


def random_lowering(name: str, config: dict[str, Any], folder: Path) -> Lowering:
    """Write the settings and a tokenizer into a folder, and return the model with its random weights."""
    config = dict(config)
    if "attention_layers" in config:
        attention = config.pop("attention_layers")
        layers = range(config["num_hidden_layers"])
        config["layer_types"] = ["full_attention" if layer in attention else "conv" for layer in layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    train_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "random").write_bytes(b"")
    tensors = RandomTensors(is_stacked=config["model_type"] in ("gpt_oss", "gemma4_text"))
    lowering = lower(RandomCheckpoint(folder, name, config, {}, tensors))
    tensors.shapes |= {place.name: place.shape for place in lowering.dense.values()}
    return lowering


def write(name: str, folder: Path) -> None:
    """Write the bundle into `folder / "q4"`, which must not exist, and the tokenizer."""
    source, target = folder / "checkpoint", folder / "q4"
    lowering = random_lowering(name, SHAPES[name], source)
    plan = uniform_plan(lowering.model, SPEC, SPEC, lowering.float_type)
    profile, disk = probe_host(source), Disk()
    content = BundleContent(plan, summarise_device(profile, plan))
    partial = folder / "q4.partial"
    manifest = emit(lowering, content, partial, packed_units=RandomUnits(plan), disk=disk)
    finish(partial, manifest, b"{}\n", f"# Random weights in the shape of {name}\n".encode(), disk)
    publish_directory(disk, partial, target)


def main() -> None:
    """Read the command line and write the bundle."""
    parser = argparse.ArgumentParser(description="Write a bundle of random weights in the shape of a published model.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(options.name, options.folder)


if __name__ == "__main__":
    main()
