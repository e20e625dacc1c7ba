"""Model families: how each checkpoint names its weights and settings.

No other package depends on these names.
A family is one module with `lower(checkpoint) -> Lowering`. FAMILIES lists it by the `model_type` of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moec.manifests.errors import CheckpointError

from ..checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from . import (
    deepseek,
    deepseek_moe,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granite,
    minicpm,
    mixtral,
    olmoe,
    phimoe,
    qwen,
    switch_transformers,
)
from .lowering import Lowering, TensorSource

__all__ = ["FAMILIES", "Lowering", "TensorSource", "lower"]

FAMILIES: Mapping[str, Callable[[Checkpoint], Lowering]] = {
    "deepseek": deepseek_moe.lower,
    "deepseek_v2": deepseek.lower_v2,
    "deepseek_v3": deepseek.lower_v3,
    "ernie4_5_moe": ernie4_5_moe.lower,
    "glm4_moe": glm4_moe.lower,
    "gpt_oss": gpt_oss.lower,
    "granitemoe": granite.lower,
    "minicpm": minicpm.lower,
    "mixtral": mixtral.lower,
    "olmoe": olmoe.lower,
    "phimoe": phimoe.lower,
    "qwen2_moe": qwen.lower_qwen2,
    "qwen3_moe": qwen.lower_qwen3,
    "switch_transformers": switch_transformers.lower,
}


def lower(checkpoint: Checkpoint) -> Lowering:
    """Translate a checkpoint.

    Raises CheckpointError if the family is unknown, or if the family does not support a setting.
    """
    family = checkpoint.config["model_type"]
    if family not in FAMILIES:
        raise CheckpointError(
            f"`{checkpoint.root / CONFIG_NAME}`: model family `{family}` is unknown, expected one of "
            f"{', '.join(f'`{name}`' for name in sorted(FAMILIES))}",
            "compile a model of a known family",
        )
    return FAMILIES[family](checkpoint)
