"""What the little model of big-little says of a traced run's tokens, so that `moec simulate` can decide by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.errors import OptionError
from moec.runtime.modes.decoder import LossyDecoder, check_modes, confidence
from moec.runtime.modes.settings import parse_modes

from .measurement import measure_decode
from .runtime_options import open_engine

if TYPE_CHECKING:
    from moec.runtime.options import RuntimeOptions
    from moec.runtime.trace import Trace, TracedPass

_BIG_LITTLE = "gamma=1"


class _Witness(LossyDecoder):
    """Notes how sure the little model is of every token, and falls back each time: the text is the whole model's."""

    def __init__(self, lossy: LossyDecoder) -> None:
        super().__init__(lossy.modes, lossy.model, lossy.versions, lossy.cache)
        self.found: list[float] = []

    def is_unsure(self, logits: np.ndarray, gamma: float) -> np.ndarray:
        self.found.append(float(confidence(logits)[0]))
        return np.ones(len(logits), bool)


def with_little_model(
    trace: Trace, path: Path, options: RuntimeOptions, kernels: str | None, sequence: list[int], prompt_tokens: int
) -> Trace:
    """The trace with what half of the experts make of each token, by an engine of its own; without, where there is no
    little model.
    """
    if not _has_little_model(path):
        return trace
    with open_engine(path, replace(options, big_little=_BIG_LITTLE), kernels) as engine:
        if engine.lossy is None:
            return trace
        engine.lossy = witness = _Witness(engine.lossy)
        _, tracer = measure_decode(engine, sequence, prompt_tokens, title="asking the little model")
    passes = tracer.passes[: trace.prompt_passes] + tracer.passes[trace.prompt_passes :: 2]
    told = [None] * trace.prompt_passes + witness.found
    noted = zip(trace.passes, passes, told, strict=True)
    return replace(trace, passes=tuple(_noted(each, little, sure) for each, little, sure in noted))


def _noted(each: TracedPass, little: TracedPass, sure: float | None) -> TracedPass:
    if each.scores is None or little.scores is None or sure is None:
        return each
    return replace(each, scores=replace(each.scores, little_logits=little.scores.logits, confidence=sure))


def _has_little_model(path: Path) -> bool:
    from moec.runtime.bundle import open_bundle

    try:
        check_modes(parse_modes(None, _BIG_LITTLE, None), open_bundle(path).manifest.model, 0)
    except OptionError:
        return False
    return True
