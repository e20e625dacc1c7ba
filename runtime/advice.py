"""What a prefetcher would have advised while a recorded pass ran."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moec.manifests.model import ModelSpec

from .bundle import Tables
from .options import Prefetch
from .prefetch import Advisor, PassState, table_predictor
from .timeline import Advice
from .trace import TracedPass


def recorded_advice(each: TracedPass, layer: int) -> Sequence[int]:
    """What was advised when the trace was made."""
    return each.advice[layer - each.first_layer]


def no_advice(each: TracedPass, layer: int) -> Sequence[int]:
    """Nothing is read ahead."""
    return ()


def table_advice(kind: Prefetch, tables: Tables, model: ModelSpec) -> Advice:
    """What a bundle's tables say of the layers that have run. Raises KeyError for `lookahead`, which asks routers."""
    first = [0, *np.cumsum([layer.experts.count for layer in model.layers]).tolist()]
    advisor = Advisor(model, first, table_predictor(kind, tables, model))

    def advise(each: TracedPass, layer: int) -> Sequence[int]:
        before = [np.empty((each.tokens, 0), np.int32)] * each.first_layer  # an encoder's layers chose for others
        parts = each.chosen[: layer - each.first_layer + 1]
        chosen = [*before, *(np.array(part, np.int32).reshape(each.tokens, -1) for part in parts)]
        return advisor.advise(PassState(layer, np.empty((each.tokens, 0), np.float32), chosen))[1]

    return advise if advisor.predictor is not None else no_advice
