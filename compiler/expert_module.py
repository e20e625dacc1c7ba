"""The experts of transformers' models under one face, whether stored [outputs, inputs] or the other way round.

Shapes: n tokens, D hidden, F expert width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def projection_of(module: Any, expert: int, projection: str) -> Tensor:
    """A view of gate or up [F, D], or of down [D, F]."""
    if projection == "down":
        down: Tensor = module.down_proj.data[expert]
        return down.T if module.is_transposed else down
    fused: Tensor = module.gate_up_proj.data[expert]
    if module.is_transposed:  # inputs first; gate and up take turns
        return fused[:, (0 if projection == "gate" else 1) :: 2].T
    width = fused.shape[0] // 2
    return fused[:width] if projection == "gate" else fused[width:]


def gated(module: Any, expert: int, gate: Tensor, up: Tensor) -> Tensor:
    """What down reads, from the products of gate and up [n, F], to which biases are added here. -> [n, F]."""
    takes_turns = module.is_transposed
    together = torch.stack([gate, up], dim=2).flatten(1) if takes_turns else torch.cat([gate, up], dim=1)
    if module.has_bias:
        together = together + module.gate_up_proj_bias[expert]
    found: Tensor = module._apply_gate(together)
    return found


def intermediate(module: Any, expert: int, rows: Tensor) -> Tensor:
    """What down reads for inputs [n, D]. -> [n, F]."""
    gate, up = (rows @ projection_of(module, expert, name).T for name in ("gate", "up"))
    return gated(module, expert, gate, up)
