"""Advice of a prefetcher during recorded passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moec.manifests.model import ModelSpec

from ..bundle.tables import Tables
from ..options.runtime import Prefetch
from ..prefetch.advisor import Advisor
from ..prefetch.pass_state import PassState
from ..prefetch.predictors import table_predictor
from ..trace.trace import Trace, TracedPass
from .timeline import Advice


def recorded_advice(traced: TracedPass, layer: int) -> Sequence[int]:
    """Return the recorded advice."""
    return traced.advice[layer - traced.first_layer]


def no_advice(traced: TracedPass, layer: int) -> Sequence[int]:
    """Return no advice."""
    return ()


def table_advice(kind: Prefetch, tables: Tables, model: ModelSpec, trace: Trace) -> Advice:
    """Return advice from the tables of a bundle. Rule and distance are those of the recorded run.

    Learned thresholds start with the first pass of the trace, even if the recording engine had learned before.
    Raises KeyError for `lookahead`, which needs routers. The returned function raises KeyError for passes of another
    trace.
    """
    header, predictor = trace.header, table_predictor(kind, tables, model)
    advisor = Advisor(
        model, header.first_expert, predictor, header.prefetch_layers, header.prefetch_experts, header.prefetch_rule
    )
    if advisor.predictor is None:
        return no_advice
    # Computed once for all replays, because thresholds are learned from pass to pass. The reference to each pass keeps
    # its id unique.
    by_pass = {id(traced): (traced, _advised(advisor, traced)) for traced in trace.passes}

    def advise(traced: TracedPass, layer: int) -> Sequence[int]:
        return by_pass[id(traced)][1][layer - traced.first_layer]

    return advise


def _advised(advisor: Advisor, traced: TracedPass) -> list[list[int]]:
    """Return the advice after each layer of a pass."""
    before = [
        np.empty((traced.tokens, 0), np.int32)
    ] * traced.first_layer  # a decoder pass has no choices of the encoder
    chosen = [*before, *(np.array(experts, np.int32).reshape(traced.tokens, -1) for experts in traced.chosen)]
    hidden = np.empty((traced.tokens, 0), np.float32)
    layers = range(traced.first_layer, traced.first_layer + len(traced.chosen))
    return [advisor.advise(PassState(layer, hidden, chosen[: layer + 1]))[1] for layer in layers]
