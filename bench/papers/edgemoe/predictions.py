"""Predictions of the experts of a layer from those of earlier layers, counted on some tokens and tested on others.

Shapes: T tokens, L layers, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from moec.compiler.calibration.activation_paths import PathDictionary, count_paths, count_popularity, count_transitions
from moec.manifests.model import ModelSpec
from moec.runtime.bundle.tables import PathTables, Tables
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import PathPredictor, PopularityPredictor, Predictor

LEAST_SEEN = 200
"""Tokens on which a condition must have been seen."""
CONDITIONED_LAYER = 2


@dataclass(frozen=True)
class ConditionedUse:
    """Use of the experts of a layer by held-out tokens.

    condition: the experts in the two layers before, in words.
    label: name of the condition in a picture.
    of_all: share of all tokens that use each expert, [E].
    after: the same share of the tokens that meet the condition, [E].
    """

    condition: str
    label: str
    of_all: list[float]
    after: list[float]


def predictors(counted: np.ndarray, model: ModelSpec) -> dict[str, Predictor]:
    """Return predictors of a layer that know no, one or two earlier layers.

    counted: experts of the tokens whose paths are counted, [T, L, K].
    """
    experts = model.layers[0].experts.count
    found = count_paths(counted, experts)
    none = replace(found, keys=found.keys[:0], offsets=found.offsets[:1], experts=found.experts[:0])
    return {
        "no earlier layer": PopularityPredictor(_tables(counted, none, experts), model),
        "1 earlier layer": PathPredictor(_tables(counted, none, experts), model),
        "2 earlier layers": PathPredictor(_tables(counted, found, experts), model),
    }


def _tables(counted: np.ndarray, found: PathDictionary, experts: int) -> Tables:
    """Return the tables that the runtime has of such counts."""
    layer, before, last = found.keys.astype(np.int64).T
    keys = (layer * experts + before) * experts + last
    transitions = count_transitions(counted, experts)
    paths = PathTables(transitions, keys, found.offsets, found.experts, found.counts)
    return Tables(count_popularity(counted, experts), paths)


def found_in_top(chosen: np.ndarray, predictor: Predictor, model: ModelSpec) -> list[float]:
    """Return, for n = 1 to E, the share of chosen experts that are among the n likeliest of their layer.

    chosen: experts of the tokens that are predicted, [T, L, K].
    """
    experts = model.layers[0].experts.count
    hits, count = np.zeros(experts), 0
    hidden = np.empty((1, 0), np.float32)
    for token in chosen.astype(np.int32):
        for layer in range(CONDITIONED_LAYER - 1, model.num_layers - 1):
            scores = predictor.scores(PassState(layer, hidden, list(token[: layer + 1, None])))
            if scores is None:
                raise ValueError(f"layer {layer + 1} is not predicted")
            rank = np.empty(experts, int)
            rank[np.argsort(-scores, kind="stable")] = np.arange(experts)
            hits[rank[token[layer + 1]]] += 1
            count += token.shape[1]
    return [float(share) for share in np.cumsum(hits) / count]


def conditioned(train: np.ndarray, test: np.ndarray) -> ConditionedUse:
    """Return the use of the experts of a layer, for all tokens and after the condition that says most about it.

    The condition is one expert in each of the two layers before. It is chosen on train texts and counted on test texts.
    """
    experts, layer = int(train.max()) + 1, CONDITIONED_LAYER
    paths = count_paths(train[:, : layer + 1], experts)
    shares = []
    for start, end in pairwise(paths.offsets.tolist()):
        tokens = paths.counts[start:end].sum() / train.shape[2]
        shares.append(paths.counts[start:end].max() / tokens if tokens >= LEAST_SEEN else 0.0)
    _, first, second = paths.keys[int(np.argmax(shares))].tolist()
    meets = (test[:, layer - 2] == first).any(1) & (test[:, layer - 1] == second).any(1)
    return ConditionedUse(
        f"expert {first} (layer {layer - 2}) and {second} (layer {layer - 1})",
        f"after {first}, then {second}",
        (count_popularity(test, experts)[layer] / len(test)).tolist(),
        (count_popularity(test[meets], experts)[layer] / meets.sum()).tolist(),
    )
