"""Router outputs as text of a trace file: base64 of little-endian float32. Reading is strict.

Source: docs/format.md, Routing traces.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from moec.manifests.files.strict_json import shown

from .trace import PassScores, PromptScores

_FIELDS = {"logits", "ahead", "little_logits", "confidence"}
_PROMPT_FIELDS = {"unimportance", "ahead", "ahead_unimportance"}
_FLOAT_BYTES = 4


def scores_plain(scores: PassScores) -> dict[str, Any]:
    """Return the scores as values for JSON."""
    return {
        "logits": _text(scores.logits),
        "ahead": _texts(scores.ahead),
        "little_logits": _text(scores.little_logits),
        "confidence": scores.confidence,
    }


def prompt_scores_plain(scores: PromptScores) -> dict[str, Any]:
    """Return the scores of a pass of several tokens as values for JSON."""
    return {
        "unimportance": _text(scores.unimportance),
        "ahead": _texts(scores.ahead),
        "ahead_unimportance": _texts(scores.ahead_unimportance),
    }


def read_prompt_scores(plain: object, experts: Sequence[int]) -> PromptScores:
    """Read the scores of one pass of several tokens.

    experts: number of experts of each layer.
    Raises ValueError with what was expected and found.
    """
    if not isinstance(plain, dict) or set(plain) != _PROMPT_FIELDS:
        raise ValueError(f"`prompt_scores`: expected null or an object of {', '.join(sorted(_PROMPT_FIELDS))}")
    return PromptScores(
        unimportance=_floats("unimportance", plain["unimportance"], sum(experts)),
        ahead=_ahead("ahead", plain["ahead"], experts),
        ahead_unimportance=_ahead("ahead_unimportance", plain["ahead_unimportance"], experts),
    )


def read_scores(plain: object, experts: Sequence[int]) -> PassScores:
    """Read the scores of one pass.

    experts: number of experts of each layer.
    Raises ValueError with what was expected and found.
    """
    if not isinstance(plain, dict) or set(plain) != _FIELDS:
        raise ValueError(f"`scores`: expected null or an object of {', '.join(sorted(_FIELDS))}")
    total, confidence = sum(experts), plain["confidence"]
    if confidence is not None and (type(confidence) not in (int, float) or not 0 <= confidence <= 1):
        raise ValueError(f"`confidence`: expected null or a number of 0 to 1, found {shown(confidence)}")
    little = _floats("little_logits", plain["little_logits"], total if confidence is not None else 0)
    return PassScores(
        logits=_floats("logits", plain["logits"], total),
        ahead=_ahead("ahead", plain["ahead"], experts),
        little_logits=little,
        confidence=None if confidence is None else float(confidence),
    )


def layer_logits(data: bytes, experts: Sequence[int]) -> list[np.ndarray]:
    """Split the logits of all layers that route into float32 [E] of each layer.

    experts: number of experts of each layer.
    """
    return np.split(as_floats(data), np.cumsum(experts)[:-1])


def as_floats(data: bytes) -> np.ndarray:
    """Return little-endian float32 bytes as an array."""
    return np.frombuffer(data, "<f4").astype(np.float32)


def _ahead(name: str, plain: object, experts: Sequence[int]) -> tuple[tuple[bytes, ...], ...]:
    if not isinstance(plain, list) or len(plain) != len(experts):
        raise ValueError(f"`{name}`: expected a list of {len(experts)}")
    return tuple(_layers_ahead(name, layer, scores, experts) for layer, scores in enumerate(plain))


def _layers_ahead(name: str, layer: int, texts: object, experts: Sequence[int]) -> tuple[bytes, ...]:
    """Read the scores of the layers after this one that route, nearest first.

    After the last of them they are the scores of the next token's first layer.
    """
    routed = [at for at, count in enumerate(experts) if count]
    following = [at for at in routed if at > layer] or routed[:1]
    if not isinstance(texts, list) or len(texts) > len(following):
        raise ValueError(f"`{name}[{layer}]`: expected a list of at most {len(following)}")
    return tuple(_floats(f"{name}[{layer}]", text, experts[at]) for text, at in zip(texts, following, strict=False))


def _floats(name: str, text: object, count: int) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        data = None
    if data is None:
        raise ValueError(f"`{name}`: expected base64")
    if len(data) != count * _FLOAT_BYTES:
        raise ValueError(f"`{name}`: expected {count} numbers, found {len(data)} bytes")
    if not np.isfinite(as_floats(data)).all():
        raise ValueError(f"`{name}`: expected finite numbers")
    return data


def _texts(layers: Sequence[Sequence[bytes]]) -> list[list[str]]:
    return [[_text(data) for data in layer] for layer in layers]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
