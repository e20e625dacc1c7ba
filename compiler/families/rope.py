"""Rotary embeddings of config.json: plain ones, and those stretched to a longer context.

Frequencies of stretched ones are those that transformers computes from the same config.json.
"""

from __future__ import annotations

import math
from typing import Any

from moec.manifests.model import RopeSpec

from ..checkpoint.stand_ins import read_config
from .settings import Settings

_REMEDY = "compile a checkpoint whose rotary embedding is plain or one of these"
_STRETCHED = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
        "original_max_position_embeddings",
    },
}  # fmt: skip
_PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_EARLY_THETA = 10_000.0


def read_rope(settings: Settings, head_size: int, *, share: float = 1.0, interleaved: bool = False) -> RopeSpec:
    """The rotary embedding of heads of this size. share: of features that rotate, where config.json does not say.

    Raises CheckpointError naming the key.
    """
    kind, parameters = _parameters(settings)
    return _rope(settings, kind, parameters, int(head_size * _share(settings, parameters, share)), interleaved)


def read_early_rope(settings: Settings, head_size: int, *, share: float = 1.0, interleaved: bool = False) -> RopeSpec:
    """As `read_rope`, of code that came with a checkpoint: plain or `linear`, over whole heads of hidden_size / heads.

    Its base is 10,000 where config.json does not say. Raises CheckpointError naming the key.
    """
    kind, parameters = _parameters(settings)
    if kind not in ("default", "linear"):
        settings.fail("rope_scaling", "rope type `linear` or null", _REMEDY)
    if head_size * settings.integer("num_attention_heads") != settings.integer("hidden_size"):
        settings.fail("head_dim", "hidden_size divided by num_attention_heads")
    if _share(settings, parameters, share) != 1:
        settings.fail("partial_rotary_factor", "1", _REMEDY)
    return _rope(settings, kind, parameters, head_size, interleaved, _EARLY_THETA)


def _share(settings: Settings, parameters: dict[str, Any], share: float) -> float:
    """The share of features that rotate. Raises CheckpointError."""
    stated = parameters.get("partial_rotary_factor", settings.raw("partial_rotary_factor"))
    if stated is not None and (type(stated) not in (int, float) or not 0 < stated <= 1):
        settings.fail("partial_rotary_factor", "a share of 0 to 1")
    return share if stated is None else float(stated)


def _rope(
    settings: Settings,
    kind: str,
    parameters: dict[str, Any],
    size: int,
    interleaved: bool,
    default_theta: float | None = None,
) -> RopeSpec:
    theta = settings.rope_theta(default_theta)
    if kind == "default":
        return RopeSpec(theta, size, interleaved)
    frequencies, magnitude = _stretched(settings, kind)
    return RopeSpec(theta, size, interleaved, tuple(frequencies), magnitude)


def score_magnitude(settings: Settings) -> float:
    """What a stretched embedding multiplies scores with, in the models that ask for it (`mscale_all_dim`).

    Source: YaRN, section 3.4; DeepSeek-V2, modeling code.
    """
    kind, parameters = _parameters(settings)
    share = parameters.get("mscale_all_dim") or 0
    factor = parameters.get("factor", 1)
    if kind == "default" or not share or factor <= 1:
        return 1.0
    return float((0.1 * share * math.log(factor) + 1.0) ** 2)


def _parameters(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The kind of embedding and its parameters, by whichever of two names config.json has them."""
    kind, found = "default", dict[str, Any]()
    for key in ("rope_scaling", "rope_parameters"):
        value = settings.raw(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            settings.fail(key, "an object or null")
        kind = str(value.get("rope_type", value.get("type", "default")))
        if kind != "default" and kind not in _STRETCHED:
            settings.fail(key, f"rope type `default`, {', '.join(f'`{name}`' for name in _STRETCHED)}", _REMEDY)
        allowed = _PLAIN | _STRETCHED.get(kind, set())
        unknown = sorted(set(value) - allowed)
        if unknown:
            settings.fail(key, f"a rotary embedding without `{unknown[0]}`", _REMEDY)
        found.update(value)
    return kind, found


def _stretched(settings: Settings, kind: str) -> tuple[list[float], float]:
    """Radians per position of each pair, and the factor of cosines and sines."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](read_config(settings.checkpoint), device=None)
    except (
        ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, OSError, StrictDataclassError
    ) as error:  # fmt: skip
        settings.fail("rope_scaling", f"parameters that transformers accepts ({error})")
    return [float(value) for value in frequencies.tolist()], float(magnitude)
