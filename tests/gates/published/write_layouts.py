"""Write `layouts.json`: settings, and names, shapes and types of the tensors of published checkpoints.

    python -m tests.gates.published.write_layouts

Settings come from `SETTINGS`, whose values are those of the published config.json. Tensors are those that transformers
saves for such a model: its conversion mapping tells the names on the hub. No checkpoint is loaded.
A pattern stands for many tensors: `layers.{0-39}` has forty, `{0,3-5}` four.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

HERE = Path(__file__).parent
SHAPES = json.loads((HERE.parents[2] / "bench" / "shapes" / "shapes.json").read_text(encoding="utf-8"))
CONFIGS = {
    entry["checkpoint"]: entry["config"]
    for entry in json.loads((HERE.parents[1] / "compiler" / "families" / "published_configs.json").read_text())
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_TYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
_LFM = {key: value for key, value in SHAPES["lfm2.5-8b-a1b"].items() if key != "attention_layers"}
_LFM["layer_types"] = [
    "full_attention" if at in SHAPES["lfm2.5-8b-a1b"]["attention_layers"] else "conv" for at in range(24)
]
# Checkpoint -> class in transformers and settings. Without any, the defaults of the class are those of the checkpoint.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3.6-35B-A3B": ("Qwen3_5Moe", {"text_config": SHAPES["qwen3.6-35b-a3b"]}),
    "google/gemma-4-26B-A4B-it": ("Gemma4", {"text_config": SHAPES["gemma-4-26b-a4b"]}),
    "openai/gpt-oss-20b": ("GptOss", CONFIGS["openai/gpt-oss-20b"]),
    "Qwen/Qwen3-30B-A3B": ("Qwen3Moe", CONFIGS["Qwen/Qwen3-30B-A3B"]),
    "LiquidAI/LFM2.5-8B-A1B": ("Lfm2Moe", _LFM),
    "zai-org/GLM-4.7-Flash": ("Glm4MoeLite", SHAPES["glm-4.7-flash"]),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("Qwen3Next", {}),
    "poolside/Laguna-XS.2": ("Laguna", {}),
    "baidu/ERNIE-4.5-21B-A3B-PT": ("Ernie4_5_Moe", {}),
    "allenai/OLMoE-1B-7B-0924": ("Olmoe", CONFIGS["allenai/OLMoE-1B-7B-0924"]),
    "deepseek-ai/DeepSeek-V2-Lite": ("DeepseekV2", CONFIGS["deepseek-ai/DeepSeek-V2-Lite"]),
    "microsoft/Phi-3.5-MoE-instruct": ("Phimoe", CONFIGS["microsoft/Phi-3.5-MoE-instruct"]),
    "JetBrains/Mellum2-12B-A2.5B": ("Mellum", {}),
}


def layout(kind: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Return config.json and the tensors of a checkpoint, type and shape by name."""
    config = getattr(transformers, f"{kind}Config")(**settings)
    has_parts = hasattr(config, "text_config")
    name = f"{kind}For{'ConditionalGeneration' if has_parts else 'CausalLM'}"
    with torch.device("meta"):
        model = getattr(transformers, name)(config).to(torch.bfloat16)
    tied = config.get_text_config().tie_word_embeddings
    state = {key: value for key, value in model.state_dict().items() if not (tied and key.endswith("lm_head.weight"))}
    saved = revert_weight_conversion(model, state)
    plain = {**config.to_diff_dict(), "architectures": [name]}
    tensors = {key: (_TYPES[value.dtype], tuple(value.shape)) for key, value in saved.items()}
    return plain, in_mxfp4(tensors) if kind == "GptOss" else tensors


def in_mxfp4(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of gpt-oss as published: stacks of blocks and scales, outputs before inputs."""
    found = dict[str, tuple[str, tuple[int, ...]]]()
    for name, (dtype, shape) in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = (dtype, shape)
            continue
        experts, inputs, outputs = shape
        found[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // 32, 16))
        found[f"{name}_scales"] = ("U8", (experts, outputs, inputs // 32))
    return found


def patterns(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[list[Any]]:
    """Return [pattern, type, shape] of all tensors."""
    groups = defaultdict[tuple[Any, ...], list[tuple[int, ...]]](list)
    for name, (dtype, shape) in tensors.items():
        groups[_NUMBER.sub("{}", name), dtype, shape].append(tuple(map(int, _NUMBER.findall(name))))
    listed = list[list[Any]]()
    for (template, dtype, shape), places in groups.items():
        axes = [sorted(set(axis)) for axis in zip(*places, strict=True)]
        if len(places) != len(list(itertools.product(*axes))):
            raise ValueError(f"`{template}` is no product of ranges")
        listed.append([template.format(*("{" + _ranges(axis) + "}" for axis in axes)), dtype, list(shape)])
    return listed


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: 0, 1, 2, 5 -> `0-2,5`."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def main() -> None:
    """Write the file."""
    entries = []
    for checkpoint, (kind, settings) in SETTINGS.items():
        config, tensors = layout(kind, settings)
        entries.append({"checkpoint": checkpoint, "config": config, "tensors": patterns(tensors)})
        print(checkpoint, len(tensors), len(entries[-1]["tensors"]))
    text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    (HERE / "layouts.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
