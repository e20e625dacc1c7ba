"""Record the output of the little model for the tokens of a traced run. `moec simulate` decides by it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.errors import OptionError
from moec.runtime.modes.decoder import LossyDecoder, check_modes, confidence
from moec.runtime.options.lossy import HALF, parse_modes

from ..measuring.decode_speed import measure_decode, new_tracer
from ..options.opening import open_engine

if TYPE_CHECKING:
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.trace.trace import Trace, TracedPass

_BIG_LITTLE = "gamma=1,k="


class _Witness(LossyDecoder):
    """Records the confidence of the little model for each token. Always falls back to the whole model."""

    def __init__(self, lossy: LossyDecoder) -> None:
        super().__init__(lossy.modes, lossy.model, lossy.versions, lossy.cache)
        self.confidences: list[float] = []

    def is_unsure(self, logits: np.ndarray, gamma: float) -> np.ndarray:
        self.confidences.append(float(confidence(logits)[0]))
        return np.ones(len(logits), bool)


def with_little_model(
    trace: Trace,
    path: Path,
    options: RuntimeOptions,
    kernels: str | None,
    sequence: list[int],
    prompt_tokens: int,
    little_k: str = HALF,
) -> Trace:
    """Return a trace with the router logits and the confidence of the little model, computed by another engine.

    If the model has no little model and little_k is `K/2`, the trace stays as it is.
    sequence: tokens of the run, the prompt first.

    little_k: experts of the little model per token and layer, or `K/2`.
    Raises OptionError for a number that the model does not have.
    """
    if not has_little_model(path, little_k):
        return trace
    lossy = f"big-little {_BIG_LITTLE}{little_k}"
    with open_engine(path, replace(options, lossy=lossy), kernels) as engine:
        if engine.lossy is None:
            return trace
        engine.lossy = witness = _Witness(engine.lossy)
        tracer = new_tracer(engine)
        measure_decode(engine, sequence, prompt_tokens, title="asking the little model", tracer=tracer)
    passes = tracer.passes[: trace.prompt_passes] + tracer.passes[trace.prompt_passes :: 2]
    confidences = [None] * trace.prompt_passes + witness.confidences
    joined: list[TracedPass] = []
    for step, little, sure in zip(trace.passes, passes, confidences, strict=True):
        if step.scores is not None and little.scores is not None and sure is not None:
            scores = replace(step.scores, little_logits=little.scores.logits, confidence=sure)
            joined.append(replace(step, scores=scores))
        else:
            joined.append(step)
    header = replace(trace.header, little_experts=0 if little_k == HALF else int(little_k))
    return replace(trace, header=header, passes=tuple(joined))


def has_little_model(path: Path, little_k: str = HALF) -> bool:
    """Return whether a bundle's model has a little model. Raises OptionError if a given number is not possible."""
    from moec.runtime.bundle.open_bundle import open_bundle

    if little_k != HALF and not re.fullmatch("[1-9][0-9]{0,5}", little_k):
        raise OptionError(f"`--trace-little {little_k[:20]}` is not a number of experts", "write it like `2`, or `K/2`")
    try:
        check_modes(parse_modes(None, f"{_BIG_LITTLE}{little_k}", None), open_bundle(path).manifest.model, 0)
    except OptionError as error:
        if little_k != HALF:
            raise OptionError(f"`--trace-little {little_k}`: {error.message}", "leave it out for `K/2`") from error
        return False
    return True
