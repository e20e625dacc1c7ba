"""The parts of all layers that are always in memory, bound to their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.model import ModelSpec

from ..layers.attention import AttentionBlock, DensePart, Weights, layer_weights, linear_rows, make_block
from ..layers.cross_attention import CrossAttention
from ..layers.norms import Norm, stream_norms
from ..layers.relative_bias import bias_by_distance
from ..layers.rotary import RotaryTables
from ..layers.routing import Router
from ..layers.shared_expert import SharedExpert


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parts of all layers, without the routed experts.

    dense_part: attention of each layer, and the product of the head.
    cross: attention to the prompt, by layer of a decoder with an encoder.

    norms: norms of the residual stream by the name of their weights.
    routers: router of each layer; None for a layer without routed experts.
    shared_experts: by layer.
    """

    dense_part: DensePart
    cross: dict[int, CrossAttention]
    norms: dict[str, Norm]
    routers: list[Router | None]
    shared_experts: dict[int, SharedExpert]


def layer_parts(manifest: BundleManifest, dense: dict[str, Any], context: int) -> LayerParts:
    """Bind the dense weights of a bundle.

    dense: dense weights by name, as of `load_dense`.
    context: positions of the cache, C.
    """
    model = manifest.model
    norms = stream_norms(model, dense)
    weights = [layer_weights(dense, at) for at in range(model.num_layers)]
    blocks = _attention_blocks(model, dense, weights, norms, context)
    cross: dict[int, CrossAttention] = {}
    routers: list[Router | None] = []
    shared_experts: dict[int, SharedExpert] = {}
    for at, (layer, layer_weights_at) in enumerate(zip(model.layers, weights, strict=True)):
        experts = layer.experts
        if layer.cross is not None:
            cross[at] = CrossAttention(layer.cross, layer_weights_at)
        if experts.count:
            pruned = manifest.pruned_experts[at]
            routers.append(Router(experts, layer_weights_at.get("router"), layer_weights_at.get("router_bias"), pruned))
        else:
            routers.append(None)
        if layer.shared:
            shared_experts[at] = SharedExpert(layer_weights_at, experts.activation)
    head = partial(linear_rows, dense[model.head_name])
    return LayerParts(DensePart(blocks, head), cross, norms, routers, shared_experts)


def _attention_blocks(
    model: ModelSpec, dense: Weights, weights: Sequence[Weights], norms: dict[str, Norm], context: int
) -> list[AttentionBlock]:
    """Return the attention of each layer. Layers with the same rotary embedding share its tables.

    weights: weights of each layer.
    """
    ropes = {layer.attention.rope for layer in model.layers if layer.attention.rope is not None}
    rotary = {rope: RotaryTables(rope, context) for rope in ropes}
    biases = _relative_biases(model, dense, context)
    blocks = []
    for at, layer in enumerate(model.layers):
        tables = None if layer.attention.rope is None else rotary[layer.attention.rope]
        bias = biases.get(at < model.first_decoder_layer)
        blocks.append(
            make_block(model, layer.attention, weights[at], norms[f"layers.{at}.attention_norm"], tables, bias)
        )
    return blocks


def _relative_biases(model: ModelSpec, dense: Weights, context: int) -> dict[bool, np.ndarray]:
    """Return the biases by distance of the encoder (True) and of the decoder (False), as far as there are any."""
    biases = {}
    for sees_ahead in (True, False) if model.encoder is not None else (False,):
        first = 0 if sees_ahead else model.first_decoder_layer
        spec = model.layers[first].attention.relative_bias
        if spec is not None:
            table = dense[f"layers.{first}.relative_bias"]
            biases[sees_ahead] = bias_by_distance(table, spec, context, sees_ahead)
    return biases
