"""Routed layers in place of those of transformers, with one interface: they pass indices and weights to experts.

Shapes: B rows, T tokens of a row, D hidden, E experts, K top-k, N = tokens of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .expert_module import SeparateExperts

_EXPERTS_IMPLEMENTATION = "moec_sorted"
_NO_CAPACITY = 1 << 62


def take_sorted_experts(model: Any) -> Any:
    """Return the module of the routed experts of a model of one layer, None if it has none.

    If they are plain, `sorted_experts` becomes their forward pass.
    """
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            if _is_plain(module):
                # Its import takes 2 s, and a compile that runs no layer does without it.
                from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

                ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_IMPLEMENTATION, sorted_experts)
                model.set_experts_implementation(_EXPERTS_IMPLEMENTATION)
            return module
    return None


def _is_plain(module: Any) -> bool:
    """Return whether `sorted_experts` fits the module: gated, without biases, weights [outputs, inputs]."""
    plain = not module.has_bias and not module.is_transposed and module.has_gate
    return bool(plain and not module.has_post_expert_norm and not module._is_expert_parallel)


def sorted_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute routed experts with one product per expert: hidden [N, D], index and weights [N, K] -> [N, D].

    It replaces the loop of transformers and gives 8 to 14 % more tokens/s at 2,048 tokens and 8 experts. The
    contributions of a token are added in the order of its top-k.
    """
    top_k = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=module.num_experts).cpu().tolist()
    rows = hidden_states.index_select(0, order // top_k)
    outputs = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            piece = slice(start, start + count)
            gated = module._apply_gate(functional.linear(rows[piece], module.gate_up_proj[expert]))
            torch.mm(gated, module.down_proj[expert].T, out=outputs[piece])
            start += count
    outputs.mul_(top_k_weights.reshape(-1)[order].unsqueeze(-1))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return outputs.index_select(0, place).view(len(hidden_states), top_k, -1).sum(1)


class RoutedLayer(torch.nn.Module):
    """A routed feed-forward in place of the one of transformers, with its router. It passes indices to the experts.

    Capacity is counted in an encoder alone, as in generation. A decoder pass over a whole answer must route each token
    like a token that is decoded alone.
    """

    def __init__(self, replaced: Any, has_capacity: bool) -> None:
        super().__init__()
        self.router, self.experts = replaced.router, SeparateExperts(replaced.experts)
        if not has_capacity:
            self.router.expert_capacity = _NO_CAPACITY

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]. Tokens over the capacity keep their expert with weight 0."""
        is_within, weights, logits = self.router(hidden_states)
        weights = (weights * is_within.sum(-1, keepdim=True)).flatten(0, 1)
        chosen = logits.argmax(-1, keepdim=True).flatten(0, 1)
        summed: Tensor = self.experts(hidden_states.flatten(0, 1), chosen, weights)
        return summed.view_as(hidden_states)


def replace_routed_layer(stack: Any, has_capacity: bool) -> SeparateExperts | None:
    """Put a RoutedLayer into an encoder or a decoder of one layer. Return its experts, None if it has none."""
    for name, module in stack.named_modules():
        if name.endswith(".mlp") and hasattr(module, "experts"):
            routed = RoutedLayer(module, has_capacity)
            stack.get_submodule(name.rpartition(".")[0]).mlp = routed
            return routed.experts
    return None
