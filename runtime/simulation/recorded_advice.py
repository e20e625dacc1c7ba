"""What a prefetcher would have advised while a recorded pass ran."""

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


def recorded_advice(each: TracedPass, layer: int) -> Sequence[int]:
    """What was advised when the trace was made."""
    return each.advice[layer - each.first_layer]


def no_advice(each: TracedPass, layer: int) -> Sequence[int]:
    """Nothing is read ahead."""
    return ()


def table_advice(kind: Prefetch, tables: Tables, model: ModelSpec, trace: Trace) -> Advice:
    """What a bundle's tables say of the layers of a trace, pass by pass, by the rule and as far as was recorded.

    What is sure enough is learned from the first pass of the trace on, whatever the recording engine knew before.
    Raises KeyError for `lookahead`, which asks routers, and for passes of another trace.
    """
    header, predictor = trace.header, table_predictor(kind, tables, model)
    advisor = Advisor(
        model, header.first_expert, predictor, header.prefetch_layers, header.prefetch_experts, header.prefetch_rule
    )
    if advisor.predictor is None:
        return no_advice
    # Once for all replays: what is sure enough is learned from pass to pass. Passes are held, so that ids stay theirs.
    found = {id(each): (each, _advised(advisor, each)) for each in trace.passes}

    def advise(each: TracedPass, layer: int) -> Sequence[int]:
        return found[id(each)][1][layer - each.first_layer]

    return advise


def _advised(advisor: Advisor, each: TracedPass) -> list[list[int]]:
    """Behind each layer of a pass."""
    before = [np.empty((each.tokens, 0), np.int32)] * each.first_layer  # an encoder's layers chose for others
    chosen = [*before, *(np.array(part, np.int32).reshape(each.tokens, -1) for part in each.chosen)]
    hidden = np.empty((each.tokens, 0), np.float32)
    layers = range(each.first_layer, each.first_layer + len(each.chosen))
    return [advisor.advise(PassState(layer, hidden, chosen[: layer + 1]))[1] for layer in layers]
