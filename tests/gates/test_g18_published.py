"""G18: published checkpoints are accepted, counted and planned; others are refused by name.

`published/layouts.json` has their settings and the names, shapes and types of their tensors, without any weight. Files
of full size are written that hold nothing: the disk stores only their heads.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.fit.config_file import open_config
from moec.compiler.fit.estimate import count_parameters
from moec.compiler.preflight.preflight import preflight
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.errors import CheckpointError
from moec.manifests.quant import QuantSpec
from tests.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.gate("G18")
LAYOUTS = json.loads((Path(__file__).parent / "published" / "layouts.json").read_text(encoding="utf-8"))
NAMES = [entry["checkpoint"].rpartition("/")[2] for entry in LAYOUTS]
# Weights of all layers for text, and those that a token uses, in billions, as the model cards round them.
BILLIONS = {
    "Qwen3.6-35B-A3B": (35, 3), "gemma-4-26B-A4B-it": (25.2, 3.8), "gpt-oss-20b": (20.9, 3.6),
    "Qwen3-30B-A3B": (30.5, 3.3), "LFM2.5-8B-A1B": (8.3, 1.5), "GLM-4.7-Flash": (30, 3.3),
    "Qwen3-Next-80B-A3B-Instruct": (80, 3), "Laguna-XS.2": (33, 3), "ERNIE-4.5-21B-A3B-PT": (21, 3),
    "OLMoE-1B-7B-0924": (6.9, 1.3), "DeepSeek-V2-Lite": (15.7, 2.4), "Phi-3.5-MoE-instruct": (41.9, 6.6),
    "Mellum2-12B-A2.5B": (12, 2.5),
}  # fmt: skip
REFUSED = (
    "bailing_hybrid", "deepseek_v4", "glm5_next", "granitemoehybrid", "nemotron_h", "qwen4_exp", "llama4_text",
)  # fmt: skip
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
_FACTORS = ("layer_scalar", "per_expert_scale")  # of bfloat16; zeros are refused
_RANGES = re.compile(r"\{([\d,-]+)\}")


def names_of(pattern: str) -> list[str]:
    """Return the names that a pattern stands for."""
    axes = []
    for listed in _RANGES.findall(pattern):
        bounds = [part.split("-") for part in listed.split(",")]
        axes.append([number for ends in bounds for number in range(int(ends[0]), int(ends[-1]) + 1)])
    return [_RANGES.sub("{}", pattern).format(*numbers) for numbers in itertools.product(*axes)]


def write(folder: Path, entry: dict[str, Any]) -> Path:
    """Write a checkpoint of zeros that takes the disk only its head."""
    header, at = dict[str, Any](), 0
    for pattern, dtype, shape in entry["tensors"]:
        size = math.prod(shape) * BYTES[dtype]
        for name in names_of(pattern):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
        for name in [name for name in header if name.endswith(_FACTORS)]:
            start, stop = header[name]["data_offsets"]
            file.seek(8 + len(text) + start)
            file.write(b"\x80\x3f" * ((stop - start) // 2))
    (folder / "config.json").write_text(json.dumps(entry["config"]))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("entry", LAYOUTS, ids=NAMES)
def test_a_published_checkpoint_is_accepted_counted_and_planned(entry: dict[str, Any], tmp_path: Path) -> None:
    lowering = lower(open_checkpoint(str(write(tmp_path / "model", entry))))
    preflight(lowering)
    counts = count_parameters(lowering.model)
    total, used = BILLIONS[entry["checkpoint"].rpartition("/")[2]]
    assert (counts.routed + counts.dense) / 1e9 == pytest.approx(total, rel=0.06)
    assert (counts.routed_per_token + counts.dense_per_token) / 1e9 == pytest.approx(used, rel=0.35)
    plan = uniform_plan(lowering.model, QuantSpec.parse("q4g32s"), QuantSpec.parse("q8g32s"), lowering.float_type)
    assert plan.expert_packed_bytes == pytest.approx(counts.routed * 4.5 / 8, rel=0.001)


@pytest.mark.parametrize("model_type", REFUSED)
def test_another_family_is_refused_by_name_before_a_tensor_is_read(model_type: str, tmp_path: Path) -> None:
    entry = {"config": {"model_type": model_type, "num_experts": 8}, "tensors": [["model.norm.weight", "BF16", [64]]]}
    folder = write(tmp_path / "model", entry)
    for opened in (open_config, open_checkpoint):
        with pytest.raises(CheckpointError) as refused:
            lower(opened(str(folder)))
        assert f"`{model_type}`" in refused.value.message and refused.value.hint


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_tensor_of_an_unknown_name_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (entry,) = (each for each in LAYOUTS if each["checkpoint"].endswith(name))
    more = [*entry["tensors"], ["model.language_model.layers.{0}.mlp.memory.weight", "BF16", [8, 8]]]
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.memory\.weight"):
        preflight(lower(open_checkpoint(str(write(tmp_path / "model", {**entry, "tensors": more})))))
