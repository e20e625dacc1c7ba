"""Checkpoints of mlx-lm: stacks of experts in affine codes are the experts of the folder that they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.preflight.preflight import preflight
from moec.compiler.quantization.own_codes import exact_matrices
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.targets import choose_target
from moec.compiler.request.uniform import requested_plan
from moec.manifests.errors import CheckpointError
from tests.tiny_models import save_tiny_mixtral, save_tiny_qwen3_moe

GROUP = 32
SAVED: dict[str, tuple[Callable[[Path], Path], str, dict[str, str]]] = {
    "mixtral": (save_tiny_mixtral, "block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    "qwen3_moe": (save_tiny_qwen3_moe, "mlp", {name: name for name in ("gate_proj", "up_proj", "down_proj")}),
}


def quantized(weight: Tensor, bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return words, scales and biases of a matrix, and what they stand for. Words hold the first code lowest."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales, biases = ((high - low) / ((1 << bits) - 1)).half(), low.half()
    codes = ((groups - biases.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round()
    codes = codes.nan_to_num().clamp(0, (1 << bits) - 1)  # a group of equal numbers has a scale of zero
    decoded = codes * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)
    flat, words = codes.flatten(1).long(), list[list[int]]()
    for row in flat.tolist():
        stream = sum(code << (bits * at) for at, code in enumerate(row))
        words.append([(stream >> (32 * at)) & 0xFFFFFFFF for at in range(len(row) * bits // 32)])
    packed = torch.tensor(words, dtype=torch.int64).to(torch.uint32)
    return {"weight": packed, "scales": scales, "biases": biases}, decoded.flatten(1)


def write(folder: Path, kind: str, bits: int) -> dict[str, Tensor]:
    """Write a checkpoint as mlx-lm does. Return what its quantized weights stand for."""
    save, block, projections = SAVED[kind]
    save(folder)
    tensors, expected, stored = load_file(folder / "model.safetensors"), dict[str, Tensor](), dict[str, Tensor]()
    config = json.loads((folder / "config.json").read_text())
    experts = config.get("num_local_experts") or config["num_experts"]
    for layer in range(config["num_hidden_layers"]):
        for named, own in projections.items():
            names = [f"model.layers.{layer}.{block}.experts.{expert}.{own}.weight" for expert in range(experts)]
            made = [quantized(tensors.pop(name), bits) for name in names]
            module = f"model.layers.{layer}.{block}.switch_mlp.{named}"
            for part in ("weight", "scales", "biases"):
                stored[f"{module}.{part}"] = torch.stack([parts[part].view(torch.int32) if part == "weight"
                                                          else parts[part] for parts, _ in made])  # fmt: skip
            expected |= {name: decoded for name, (_, decoded) in zip(names, made, strict=True)}
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "embed_tokens.weight", ".gate.weight"))]:
        parts, expected[name] = quantized(tensors.pop(name), 8)
        stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    stored = {
        name: value.contiguous().view(torch.uint32) if value.dtype == torch.int32 else value.contiguous()
        for name, value in stored.items()
    }
    save_file({**tensors, **stored}, folder / "model.safetensors", {"format": "mlx"})
    label: dict[str, Any] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    for layer in range(config["num_hidden_layers"]):
        for module in ("self_attn.q_proj", f"{block}.gate"):
            label[f"model.layers.{layer}.{module}"] = {"group_size": GROUP, "bits": 8}
    label["model.embed_tokens"] = {"group_size": GROUP, "bits": 8}
    (folder / "config.json").write_text(json.dumps({**config, "quantization": label, "quantization_config": label}))
    return expected


@pytest.mark.parametrize(("kind", "bits"), [("mixtral", 4), ("qwen3_moe", 2), ("qwen3_moe", 3), ("qwen3_moe", 8)])
def test_weights_are_what_their_codes_stand_for(kind: str, bits: int, tmp_path: Path) -> None:
    expected = write(tmp_path / "model", kind, bits)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    assert set(checkpoint.packed) == set(expected) and f"MLX, {bits} bits" in checkpoint.precision
    for name, weight in expected.items():
        found = checkpoint.packed[name].decode(checkpoint.stored_parts(name))
        assert torch.equal(found, weight), name
        assert torch.equal(checkpoint.tensor(name, rows=(1, 3)), checkpoint.tensor(name)[1:3])
    lowering = lower(checkpoint)
    preflight(lowering)
    options = CompileOptions(target=choose_target(None, None, None, None, None, keep_codes=True))
    dense = requested_plan(options, lowering).dense
    assert str(dense["layers.0.query"]) == "q8g32" and dense["layers.0.router"].bitwidth == 16
    for unit, need in lowering.code_needs().items():
        spec = need.least_format()
        assert spec is not None and str(spec) == f"q{bits}g32"
        (matrix,) = exact_matrices(lowering, unit, [spec]).values()
        assert torch.equal(matrix.dequantize(), expected[lowering.units[unit].name])


Damage = Callable[[dict[str, Tensor], dict[str, Any]], None]
STACK = "model.layers.0.mlp.switch_mlp.up_proj"


def _drop(name: str) -> Damage:
    return lambda tensors, config: tensors.__delitem__(name) if name in tensors else None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_drop(f"{STACK}.biases"), "is missing, expected scales and biases"),
        (
            lambda t, c: t.update({f"{STACK}.scales": t[f"{STACK}.scales"][:1].clone()}),
            "scales and biases of 4 experts",
        ),
        (lambda t, c: t.update({f"{STACK}.scales": t[f"{STACK}.scales"][:, :, :1].clone()}), "expected `biases`"),
        (lambda t, c: c["quantization"].update(bits=7), "affine codes of 2 to 8 bits, found 7"),
        (lambda t, c: c["quantization"].update(mode="mxfp4"), "2 to 8 bits, found 8, mxfp4"),
        (lambda t, c: c.update(model_type="qwen3_next"), "mlx-lm changes tensors of `qwen3_next`"),
    ],
)
def test_what_fits_no_layout_is_refused(damage: Damage, said: str, tmp_path: Path) -> None:
    write(tmp_path / "whole", "qwen3_moe", 4)
    folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / "model"))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    damage(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(str(folder))
    assert said in refused.value.message and refused.value.hint
