"""Model families: how each checkpoint names its weights and settings. No other package depends on these names.

A family is one module. FAMILIES lists it by the `model_type` of config.json. Tensor names that a module does not list
are in `decoder_weights.py`; settings shared by families are in `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from moec.manifests.errors import CheckpointError

from ..checkpoint.model_files import ModelFiles
from . import (
    afmoe,
    deepseek,
    deepseek_moe,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    hy_v3,
    kolibri1,
    laguna,
    lfm2_moe,
    minicpm,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen,
    qwen3_next,
    switch_transformers,
)
from .decoder import describe_family, lower_family
from .lowering import Lowering, TensorSource

if TYPE_CHECKING:
    from moec.manifests.model import ModelSpec

    from ..checkpoint.checkpoint import Checkpoint

__all__ = ["DECODER_NAMES", "FAMILIES", "Lowering", "TensorSource", "describe", "lower"]

_DECODERS = {
    "afmoe": (afmoe.NAMES, afmoe.parts),
    "deepseek": (deepseek_moe.NAMES, deepseek_moe.parts),
    "deepseek_v2": (deepseek.NAMES, deepseek.v2_parts),
    "deepseek_v3": (deepseek.NAMES, deepseek.v3_parts),
    "dots1": (dots1.NAMES, dots1.parts),
    "ernie4_5_moe": (ernie4_5_moe.NAMES, ernie4_5_moe.parts),
    "exaone_moe": (exaone_moe.NAMES, exaone_moe.parts),
    "flint": (qwen.FLINT_NAMES, qwen.flint_parts),
    "gemma4_text": (gemma4.NAMES, gemma4.parts),
    "glm4_moe": (glm4_moe.NAMES, glm4_moe.parts),
    "glm4_moe_lite": (deepseek.NAMES, deepseek.lite_parts),
    "gpt_oss": (gpt_oss.NAMES, gpt_oss.parts),
    "granitemoe": (granite.NAMES, granite.parts),
    "granitemoe_swa": (granite.SWA_NAMES, granite.swa_parts),
    "granitemoeshared": (granite.NAMES, granite.shared_parts),
    "hy_v3": (hy_v3.NAMES, hy_v3.parts),
    "kolibri1": (kolibri1.NAMES, kolibri1.parts),
    "laguna": (laguna.NAMES, laguna.parts),
    "lfm2_moe": (lfm2_moe.NAMES, lfm2_moe.parts),
    "mellum": (qwen.NAMES, qwen.mellum_parts),
    "minicpm": (minicpm.NAMES, minicpm.parts),
    "minimax_m2": (minimax_m2.NAMES, minimax_m2.parts),
    "mixtral": (mixtral.NAMES, mixtral.parts),
    "olmoe": (olmoe.NAMES, olmoe.parts),
    "phimoe": (phimoe.NAMES, phimoe.parts),
    "qwen2_moe": (qwen.NAMES, qwen.qwen2_parts),
    "qwen3_moe": (qwen.NAMES, qwen.qwen3_parts),
    "qwen3_5_moe_text": (qwen3_next.NAMES_3_5, qwen3_next.parts_3_5),
    "qwen3_next": (qwen3_next.NAMES, qwen3_next.parts),
    "sarvam_mla": (deepseek.NAMES, deepseek.sarvam_parts),
    "sarvam_moe": (glm4_moe.SARVAM_NAMES, glm4_moe.sarvam_parts),
    "solar_open": (glm4_moe.NAMES, glm4_moe.solar_parts),
}
DECODER_NAMES = {family: names for family, (names, _) in _DECODERS.items()}
"""Names of the weights on disk, by family. Switch is no decoder of the Llama shape."""
FAMILIES: Mapping[str, Callable[[Checkpoint], Lowering]] = {
    **{family: partial(lower_family, family, names, parts) for family, (names, parts) in _DECODERS.items()},
    "switch_transformers": switch_transformers.lower,
}
"""Functions that translate a checkpoint.

They raise CheckpointError, which names the key of config.json, if a setting is not supported.
"""


def lower(checkpoint: Checkpoint) -> Lowering:
    """Translate a checkpoint. Raises the errors of FAMILIES, and CheckpointError if the family is unknown."""
    return FAMILIES[_known_family(checkpoint)](checkpoint)


def describe(files: ModelFiles) -> ModelSpec:
    """Return the model that config.json describes. Needs no weights and no torch. Raises the errors of `lower`."""
    family = _known_family(files)
    if family in _DECODERS:
        return describe_family(family, _DECODERS[family][1], files)
    return switch_transformers.describe(files)


def _known_family(files: ModelFiles) -> str:
    family = str(files.config["model_type"])
    if family not in FAMILIES:
        raise CheckpointError(
            f"`{files.settings_file}`: model family `{family}` is unknown, expected one of "
            f"{', '.join(f'`{name}`' for name in sorted(FAMILIES))}",
            "compile a model of a known family",
        )
    return family
