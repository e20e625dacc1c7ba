"""Rotary embeddings of config.json: plain ones, and ones that are stretched to a longer context.

transformers computes the frequencies of stretched embeddings from the same config.json.
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
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
        "original_max_position_embeddings",
    },
}  # fmt: skip
_OTHER_NAMES = {"deepseek_yarn": "yarn"}
_SECTIONS = {"mrope_section", "mrope_interleaved"}  # by time, height and width; in a text all three are the position
_PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SECTIONS}
_EARLY_THETA = 10_000.0


def read_rope(
    settings: Settings, head_size: int, *, share: float = 1.0, interleaved: bool = False, layer_type: str = ""
) -> RopeSpec:
    """Return the rotary embedding of heads of this size.

    share: the share of features that rotate if config.json does not say.
    interleaved: adjacent features form pairs, not the two halves of a head.
    layer_type: the layers whose embedding it is, in families that have one for each type of layer.
    Raises CheckpointError, which names the key.
    """
    kind, parameters = _parameters(settings, layer_type)
    # `proportional` rotates the first pairs of the two halves of a whole head. The others have the frequency 0.
    size = head_size if kind == "proportional" else int(head_size * _share(settings, parameters, share))
    return _rope(settings, kind, parameters, size, interleaved, layer_type=layer_type)


def read_early_rope(settings: Settings, head_size: int, *, share: float = 1.0, interleaved: bool = False) -> RopeSpec:
    """Return the rotary embedding for families whose code comes with the checkpoint: plain or `linear`.

    It rotates whole heads of hidden_size / heads features. The default base is 10,000.
    share, interleaved: see read_rope.
    Raises CheckpointError, which names the key.
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
    """Return the share of features that rotate. Raises CheckpointError."""
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
    layer_type: str = "",
) -> RopeSpec:
    theta: Any = parameters.get("rope_theta") if layer_type else settings.rope_theta(default_theta)
    if type(theta) not in (int, float) or not theta > 0:
        settings.fail("rope_parameters", f"a positive `rope_theta` of `{layer_type}`")
    if kind == "default" or not settings.checkpoint.has_numbers:
        return RopeSpec(float(theta), size, interleaved)
    frequencies, magnitude = _stretched(settings, kind, layer_type)
    return RopeSpec(float(theta), size, interleaved, tuple(frequencies), magnitude)


def score_magnitude(settings: Settings) -> float:
    """Return the factor of the attention scores for a stretched embedding. It is 1.0 without `mscale_all_dim`.

    Source: YaRN, section 3.4; DeepSeek-V2, modeling code.
    """
    kind, parameters = _parameters(settings)
    share = parameters.get("mscale_all_dim") or 0
    factor = parameters.get("factor", 1)
    if kind == "default" or not share or factor <= 1:
        return 1.0
    return float((0.1 * share * math.log(factor) + 1.0) ** 2)


def _parameters(settings: Settings, layer_type: str = "") -> tuple[str, dict[str, Any]]:
    """Return the kind of embedding and its parameters, found under `rope_scaling` or `rope_parameters`."""
    kind, parameters = "default", dict[str, Any]()
    for key in ("rope_parameters",) if layer_type else ("rope_scaling", "rope_parameters"):
        value = settings.raw(key)
        if layer_type:
            value = value.get(layer_type) if isinstance(value, dict) else None
            if not isinstance(value, dict):
                settings.fail(key, f"an object with `{layer_type}`")
        if value is None:
            continue
        if not isinstance(value, dict):
            settings.fail(key, "an object or null")
        kind = str(value.get("rope_type", value.get("type", "default")))
        kind = _OTHER_NAMES.get(kind, kind)
        if kind != "default" and kind not in _STRETCHED:
            settings.fail(key, f"rope type `default`, {', '.join(f'`{name}`' for name in _STRETCHED)}", _REMEDY)
        allowed = _PLAIN | _STRETCHED.get(kind, set())
        unknown = sorted(set(value) - allowed)
        if unknown:
            settings.fail(key, f"a rotary embedding without `{unknown[0]}`", _REMEDY)
        parameters.update(value)
    return kind, parameters


def _stretched(settings: Settings, kind: str, layer_type: str) -> tuple[list[float], float]:
    """Return the radians per position of each pair, and the factor of cosines and sines."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config, of_layers = read_config(settings.checkpoint), {"layer_type": layer_type} if layer_type else {}
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, device=None, **of_layers)
    except (
        ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, OSError, StrictDataclassError
    ) as error:  # fmt: skip
        settings.fail("rope_scaling", f"parameters that transformers accepts ({error})")
    return [float(value) for value in frequencies.tolist()], float(magnitude)
