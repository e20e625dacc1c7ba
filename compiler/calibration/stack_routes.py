"""Counts over the routes of tokens through the encoder and the decoder: popularity, transitions, paths.

Shapes: T tokens, L layers, M routed layers of a stack, E experts of the largest layer, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moec.manifests.model import ModelSpec

from .activation_paths import (
    PathDictionary,
    PathKeys,
    count_path_sets,
    count_paths,
    count_popularity,
    count_transitions,
    join_paths,
    keeps_sets,
    report_paths,
)


@dataclass(frozen=True, eq=False, slots=True)
class StackRoutes:
    """The experts of each token in the M routed layers of a stack.

    layers: [M], indices of the layers.
    experts: uint16 [T, M, K].
    held_out: bool [T], tokens of the texts that the path report predicts.
    """

    layers: NDArray[np.int64]
    experts: NDArray[np.uint16]
    held_out: NDArray[np.bool_]


def routed_stacks(model: ModelSpec) -> list[list[int]]:
    """Return the routed layers of the encoder, if it has any, and of the decoder, if it has any."""
    first = model.first_decoder_layer
    stacks = [[at for at in model.expert_layers if (at >= first) == is_decoder] for is_decoder in (False, True)]
    return [layers for layers in stacks if layers]


def count_routes(model: ModelSpec, stacks: Sequence[StackRoutes], path_keys: PathKeys) -> dict[str, Any]:
    """Count the routes of all stacks. Return fields of ActivationStatistics.

    The path report covers the decoder alone, the last stack, whose routes are predicted.

    path_keys: `best`: the path report chooses the keys of the paths. Without held-out tokens they are pairs.
    """
    experts = max(layer.experts.count for layer in model.layers)
    routes, held_out = stacks[-1].experts, stacks[-1].held_out
    report = report_paths(routes[~held_out], routes[held_out], experts)
    decides = path_keys == "best" and not math.isnan(report.accuracy_pairs)
    has_sets = decides and keeps_sets(report, [stack.experts.shape[2] for stack in stacks])
    layers, starts = [stack.layers for stack in stacks], [stack.layers[:-1] for stack in stacks]
    popularity = [count_popularity(stack.experts, experts) for stack in stacks]
    transitions = [count_transitions(stack.experts, experts) for stack in stacks]
    paths = _paths(stacks, experts, has_sets)
    return {
        "popularity": spread(popularity, layers, model.num_layers),
        "transitions": spread(transitions, starts, model.num_layers - 1),
        "path_keys": paths.keys,
        "path_offsets": paths.offsets,
        "path_experts": paths.experts,
        "path_counts": paths.counts,
        "path_report": report,
        "paths_kept": "" if not decides else "sets" if has_sets else "pairs",
    }


def _paths(stacks: Sequence[StackRoutes], experts: int, has_sets: bool) -> PathDictionary:
    """Return the path dictionary of all stacks. The encoder's layers come first, so that keys stay sorted."""
    count = count_path_sets if has_sets else count_paths
    paths = [count(stack.experts, experts) for stack in stacks]
    for dictionary, stack in zip(paths, stacks, strict=True):
        dictionary.keys[:, 0] = stack.layers[dictionary.keys[:, 0]]
    return join_paths(paths)


def spread(stacks: Sequence[NDArray[Any]], layers: Sequence[NDArray[np.int64]], count: int) -> NDArray[Any]:
    """Put rows of some layers into an array with zeros for all other layers.

    stacks: rows of each stack.
    layers: the layer of each row, for each stack.
    count: number of layers.
    """
    rows_of_layers = np.zeros((count, *stacks[0].shape[1:]), stacks[0].dtype)
    for rows, places in zip(stacks, layers, strict=True):
        rows_of_layers[places] = rows
    return rows_of_layers
