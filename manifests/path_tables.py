"""The two forms of the path tables. Their keys are pairs of experts, or the exact sets of a token's experts.

Source: docs/format.md, Tables.
"""

from __future__ import annotations

from .model import ModelSpec

PAIR_COLUMNS = 3
"""Columns of `path.keys` in the pair form: a layer and two experts."""
PATH_SETS_VERSION = 2
"""Lowest format version that has exact sets."""


def set_columns(model: ModelSpec) -> int:
    """Return the columns of `path.keys` in the exact-set form: a layer, and the experts of a token in two layers."""
    return 1 + 2 * max(layer.experts.top_k for layer in model.layers)


def why_no_paths(model: ModelSpec) -> str:
    """Return why the path table of a model has no keys, whatever its data; empty if it can have some."""
    first = model.first_decoder_layer
    in_decoder = sum(layer >= first for layer in model.expert_layers)
    if max(in_decoder, len(model.expert_layers) - in_decoder) > 2:
        return ""
    return "no path table: it needs three routed layers in the encoder or in the decoder"


def check_path_sets(model: ModelSpec) -> None:
    """Raise ValueError unless tokens choose equally many experts, at least two, in all layers that route."""
    top_ks = sorted({layer.experts.top_k for layer in model.layers if layer.experts.count})
    if len(top_ks) != 1 or top_ks[0] < 2:
        raise ValueError(f"path_sets: expected one top-k of at least 2 in all routed layers, found {top_ks}")
