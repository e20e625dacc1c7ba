"""Numbers of weights: of a model, a layer, an expert, and those that one token is multiplied with."""

from __future__ import annotations

from math import prod

from moec.manifests.model import ModelSpec


def layer_weights(model: ModelSpec, layer: int) -> int:
    """Return the number of weights of one layer."""
    dense = sum(prod(shape) for name, shape in model.dense_shapes().items() if name.startswith(f"layers.{layer}."))
    return dense + expert_weights(model, layer) * model.layers[layer].experts.count


def outside_weights(model: ModelSpec) -> int:
    """Return the number of weights outside the layers, without those of a head of its own: embedding and norms."""
    heads = ("lm_head", "lm_head_bias")
    outside = (name for name in model.dense_shapes() if not name.startswith("layers.") and name not in heads)
    return sum(prod(model.dense_shapes()[name]) for name in outside)


def expert_weights(model: ModelSpec, layer: int) -> int:
    """Return the number of weights of one routed expert of a layer."""
    return sum(prod(model.unit_shape(layer, projection)) for projection in model.layers[layer].experts.projections)


def all_weights(model: ModelSpec) -> int:
    """Return the number of all weights."""
    layers = sum(layer_weights(model, layer) for layer in range(model.num_layers))
    return layers + sum(prod(shape) for name, shape in model.dense_shapes().items() if not name.startswith("layers."))


def active_weights(model: ModelSpec) -> int:
    """Return the number of weights that one token is multiplied with, including those of the logits."""
    head = prod(model.dense_shapes()[model.head_name])
    return head + sum(active_layer_weights(model, layer) for layer in range(model.num_layers))


def active_layer_weights(model: ModelSpec, layer: int) -> int:
    """Return the number of weights of one layer that one token is multiplied with."""
    experts, prefix = model.layers[layer].experts, f"layers.{layer}."
    dense = sum(prod(shape) for name, shape in model.dense_shapes().items() if name.startswith(prefix))
    return dense + (expert_weights(model, layer) * experts.top_k if experts.count else 0)
