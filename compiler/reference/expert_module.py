"""One interface to the experts of transformers' models.

Their weights may be [outputs, inputs] or transposed, stacked or separate.
Shapes: n tokens, D hidden, F expert width, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class SeparateExperts(torch.nn.Module):
    """Experts of two projections and ReLU, one module each, with the interface of stacked experts."""

    def __init__(self, experts: Any) -> None:
        """experts: transformers' modules `expert_0`, ... with `wi` and `wo`. They keep their names."""
        super().__init__()
        self.num_experts = len(experts)
        for name, expert in experts.items():
            self.add_module(name, expert)

    def projection(self, expert: int, projection: str) -> Tensor:
        """Return a view of up [F, D] or down [D, F]. Raises KeyError for gate, which does not exist."""
        layer = {"up": "wi", "down": "wo"}[projection]
        weight: Tensor = self.get_parameter(f"expert_{expert}.{layer}.weight").data
        return weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [n, D], index and weights [n, K] -> [n, D]. Pairs of weight 0 are not computed."""
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, rank = torch.where((top_k_index == expert) & (top_k_weights != 0))
            if len(token):
                middle = intermediate(self, expert, hidden_states[token])
                expert_out = middle @ self.projection(expert, "down").T
                out.index_add_(0, token, expert_out * top_k_weights[token, rank].unsqueeze(1))
        return out


def projection_of(module: Any, expert: int, projection: str) -> Tensor:
    """Return a view of gate or up [F, D], or of down [D, F]. Raises KeyError if the experts lack it."""
    if isinstance(module, SeparateExperts):
        return module.projection(expert, projection)
    if projection == "down":
        down: Tensor = module.down_proj.data[expert]
        return down.T if module.is_transposed else down
    fused: Tensor = module.gate_up_proj.data[expert]
    if module.is_transposed:  # [inputs, outputs], with alternating columns of gate and up
        return fused[:, (0 if projection == "gate" else 1) :: 2].T
    width = fused.shape[0] // 2
    return fused[:width] if projection == "gate" else fused[width:]


def activated(module: Any, expert: int, products: Mapping[str, Tensor]) -> Tensor:
    """Return the input of down, [n, F].

    products: products of gate and up, or of up alone, [n, F] each. Biases are added here.
    """
    if isinstance(module, SeparateExperts):
        return torch.relu(products["up"])
    gate, up = products["gate"], products["up"]
    joint = torch.stack([gate, up], dim=2).flatten(1) if module.is_transposed else torch.cat([gate, up], dim=1)
    if module.has_bias:
        joint = joint + module.gate_up_proj_bias[expert]
    out: Tensor = module._apply_gate(joint)
    return out


def projections_of(module: Any, expert: int) -> dict[str, Tensor]:
    """Return views of all projections of an expert by name, as `projection_of` gives them."""
    names = ("up", "down") if isinstance(module, SeparateExperts) else ("gate", "up", "down")
    return {name: projection_of(module, expert, name) for name in names}


def first_products(module: Any, expert: int, rows: Tensor) -> dict[str, Tensor]:
    """Return the products of the expert's inputs [n, D] with gate and up, or with up alone, [n, F] each."""
    names = ("up",) if isinstance(module, SeparateExperts) else ("gate", "up")
    return {name: rows @ projection_of(module, expert, name).T for name in names}


def intermediate(module: Any, expert: int, rows: Tensor) -> Tensor:
    """Return the input of down for the expert's inputs: [n, D] -> [n, F]."""
    return activated(module, expert, first_products(module, expert, rows))


def summed_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute routed experts with operations that have gradients: hidden [N, D], index and weights [N, K] -> [N, D]."""
    total = torch.zeros_like(hidden)
    for expert in range(int(module.num_experts)):
        tokens, rank = torch.where(chosen == expert)
        if not len(tokens):
            continue
        out = intermediate(module, expert, hidden[tokens]) @ projection_of(module, expert, "down").T
        if module.has_bias:
            out = out + module.down_proj_bias[expert]
        total = total.index_add(0, tokens, out * weights[tokens, rank].unsqueeze(1))
    return total
