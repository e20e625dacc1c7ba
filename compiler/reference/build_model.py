"""Build transformers' model of a configuration, or the stand-in of a family that transformers lacks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint


class OpenGate(torch.nn.Module):
    """Replacement of a linear gate before a sigmoid. The gate is 1 for every token."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[N, D] -> [N, 1], infinite."""
        return hidden_states.new_full((*hidden_states.shape[:-1], 1), math.inf)


def build_model(config: Any, checkpoint: Checkpoint) -> Any:
    """Build a model of a configuration of `read_config` in float32, with random or empty weights.

    Raises the errors of transformers.
    """
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32)
    if checkpoint.config["model_type"] == "deepseek":
        for layer in model.get_decoder().layers:
            if hasattr(layer.mlp, "shared_expert_gate"):
                layer.mlp.shared_expert_gate = OpenGate()
    return model
