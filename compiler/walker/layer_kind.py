"""Kinds of layers. Layers of a kind differ only in their weights, so one torch module computes all of them."""

from __future__ import annotations

from moec.manifests.model import ModelSpec

LayerKind = tuple[bool, bool, int]
"""Whether a layer routes, whether it decodes, and its sliding window."""


def layer_kind(model: ModelSpec, layer: int) -> LayerKind:
    """Return the kind of a layer."""
    spec = model.layers[layer]
    return bool(spec.experts.count), layer >= model.first_decoder_layer, spec.attention.sliding_window
