"""Rotary embeddings of type `longrope`: a short form up to the original context, a long form for longer contexts.

Phi-3.5-MoE was trained with the long frequencies beyond the original context. This module and transformers 4.x use
them there. In contrast, transformers 5.23 always uses the short ones, although it chooses the magnitude by text length.
tests/gates/test_g9_phimoe.py checks both.
Source: LongRoPE, Shorter context window recovery.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from moec.manifests.model import LongRopeSpec, RopeSpec

from .rope import read_rope
from .settings import Settings

_KEYS = ("rope_scaling", "rope_parameters")  # older configurations use the first, transformers 5 the second
_ORIGINAL = "original_max_position_embeddings"
_KNOWN = frozenset(
    {"type", "rope_type", "rope_theta", "factor", _ORIGINAL}
    | {f"{form}_{what}" for form in ("short", "long") for what in ("factor", "mscale")}
)


def read_longrope(settings: Settings, head_size: int, *, share: float = 1.0, interleaved: bool = False) -> RopeSpec:
    """Return the rotary embedding of heads of this size, plain or `longrope`. All features rotate.

    Raises CheckpointError, which names the key.
    """
    key, parameters = _parameters(settings)
    if key is None:
        said = next((key for key in _KEYS if settings.raw(key) is not None), "partial_rotary_factor")
        is_plain = parameters.get("rope_type", parameters.get("type", "default")) == "default"
        rope = read_rope(settings, head_size, share=share, interleaved=interleaved) if is_plain else None
        if rope is None or rope.rotary_size != head_size:
            settings.fail(said, "rope type `default` or `longrope`, over whole heads")
        return rope
    original = _original_positions(settings, key, parameters)
    theta = settings.rope_theta()
    forms = [_form(settings, key, parameters, name, theta, head_size) for name in ("short", "long")]
    (short, magnitude), long = forms[0], LongRopeSpec(original, *forms[1])
    is_reached = settings.integer("max_position_embeddings") > original
    return RopeSpec(theta, head_size, interleaved, short, magnitude, long if is_reached else None)


def _parameters(settings: Settings) -> tuple[str | None, dict[str, Any]]:
    """Return the key that selects `longrope`, or None, and the parameters found under both keys."""
    longrope_key, parameters = None, dict[str, Any]()
    for key in _KEYS:
        value = settings.raw(key)
        if not isinstance(value, dict):
            continue
        if value.get("rope_type", value.get("type")) == "longrope":
            longrope_key = key
        for name, what in value.items():
            if name in parameters and parameters[name] != what:
                settings.fail(key, f"the same `{name}` as under `{_KEYS[0]}`")
        parameters.update(value)
    if longrope_key is not None:
        unknown = sorted(parameters.keys() - _KNOWN)
        if unknown:
            settings.fail(longrope_key, f"a rotary embedding without `{unknown[0]}`")
    return longrope_key, parameters


def _original_positions(settings: Settings, key: str, parameters: dict[str, Any]) -> int:
    """Return how many positions the short form covers.

    The key may also stand outside `rope_scaling`. A `factor` must equal max_position_embeddings divided by it.
    Raises CheckpointError.
    """
    outside = settings.optional_integer(_ORIGINAL)
    original = parameters.get(_ORIGINAL, outside)
    if type(original) is not int or original < 1:
        settings.fail(key, f"a positive whole number as `{_ORIGINAL}`")
    if outside not in (None, original):
        settings.fail(_ORIGINAL, f"the {original} of `{key}`")
    factor = parameters.get("factor")
    if factor is not None and factor != settings.integer("max_position_embeddings") / original:
        settings.fail(key, f"`factor` to be max_position_embeddings / {original}")
    return int(original)


def _form(
    settings: Settings, key: str, parameters: dict[str, Any], form: str, theta: float, head_size: int
) -> tuple[tuple[float, ...], float]:
    """Return the `short` or the `long` form: radians per position of each pair, and the factor of cosines and sines."""
    factors, magnitude = parameters.get(f"{form}_factor"), parameters.get(f"{form}_mscale")
    if not isinstance(factors, list) or len(factors) != head_size // 2 or not all(map(_is_positive, factors)):
        settings.fail(key, f"{head_size // 2} positive numbers as `{form}_factor`")
    if not _is_positive(magnitude):
        settings.fail(key, f"a positive number as `{form}_mscale`")
    if not settings.checkpoint.has_numbers:
        return (0.0,) * len(factors), float(magnitude)
    import torch

    # transformers computes in float32 and in this order.
    exponents = torch.arange(0, head_size, 2).float() / head_size
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    return tuple(frequencies.tolist()), float(magnitude)


def _is_positive(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
