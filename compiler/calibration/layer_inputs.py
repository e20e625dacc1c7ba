"""Inputs that texts hand to the experts of one layer: routes, second moments, and samples of tokens.

Shapes: N tokens of a batch, n tokens of an expert, D hidden, F expert width, E experts, K top-k.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import ExpertsSpec

from ..reference.expert_module import intermediate
from ..walker.loaded_layer import LoadedLayer
from ..walker.texts import TextStates
from ..walker.torch_device import CPU
from ..workspace.parallel import Workers
from .collect import UNIMPORTANCE_BINS, weight_summary

SAMPLE_TOKENS = 128
"""Number of tokens of an expert on which its errors are measured: the first that it receives."""
_WEIGHT_UNSEEN = 1.0


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """Inputs that real tokens hand to the experts of a layer.

    inputs: [N, D].
    chosen: experts, [N, K].
    weights: router weights, [N, K].
    """

    inputs: Tensor
    chosen: Tensor
    weights: Tensor

    def of(self, expert: int, has_capacity: bool) -> tuple[Tensor, Tensor]:
        """Return the inputs [n, D] and router weights [n, 1] of one expert.

        has_capacity: the router drops tokens over a capacity. They have the weight 0, and no expert computes them.
        """
        is_own = self.chosen == expert
        token, rank = torch.where(is_own & (self.weights > 0) if has_capacity else is_own)
        return self.inputs[token], self.weights[token, rank].unsqueeze(1)


class LayerInputs:
    """Second moments of every projection's inputs in one layer, and a sample of the tokens of each expert.

    input_moments: sum of g^2 x x^T over the inputs x of gate and up with router weights g, [E, D, D].
    middle_moments: the sum over the inputs of down, [E, F, F].
    tokens: number of tokens of each expert, int64 [E].
    has_moments: False if the quantizer needs none. Both sums are then empty.
    device: where the sums and the samples are. The numbers of tokens are in host memory.
    """

    def __init__(
        self, experts: ExpertsSpec, hidden_size: int, has_moments: bool = True, device: torch.device = CPU
    ) -> None:
        count, self._has_moments = experts.count, has_moments
        self._has_capacity = experts.router.capacity > 0
        hidden, width = (hidden_size, experts.width) if has_moments else (0, 0)
        self.input_moments = torch.zeros(count, hidden, hidden, device=device)
        self.middle_moments = torch.zeros(count, width, width, device=device)
        self.tokens = torch.zeros(count, dtype=torch.int64)
        self._samples: list[list[Tensor]] = [[] for _ in range(count)]
        self._weights: list[list[Tensor]] = [[] for _ in range(count)]
        self._fallback = torch.zeros(0, hidden_size, device=device)

    def add(self, module: Any, batch: ExpertInputs, pool: Workers) -> None:
        """Add a batch, experts in parallel.

        module: the experts of the layer.
        """
        if len(self._fallback) < SAMPLE_TOKENS:
            self._fallback = torch.cat([self._fallback, batch.inputs[: SAMPLE_TOKENS - len(self._fallback)]])

        def one(expert: int) -> None:
            rows, weights = batch.of(expert, self._has_capacity)
            if len(rows):
                self._add_expert(module, expert, rows, weights)

        for _ in pool.in_order(one, range(len(self._samples))):
            pass

    def _add_expert(self, module: Any, expert: int, rows: Tensor, weight: Tensor) -> None:
        self.tokens[expert] += len(rows)
        if self._has_moments:
            inputs, middle = rows * weight, intermediate(module, expert, rows) * weight
            self.input_moments[expert].addmm_(inputs.T, inputs)
            self.middle_moments[expert].addmm_(middle.T, middle)
        room = SAMPLE_TOKENS - sum(map(len, self._samples[expert]))
        if room > 0:
            self._samples[expert].append(rows[:room].clone())
            self._weights[expert].append(weight[:room].clone())

    def sample(self, expert: int) -> tuple[Tensor, Tensor, float]:
        """Return tokens of an expert [n, D], their router weights [n, 1], and how many tokens each stands for.

        An expert without a token is judged on tokens of others, as if it had received one of them.
        """
        if not self._samples[expert]:
            share = self._fallback.new_full((len(self._fallback), 1), _WEIGHT_UNSEEN)
            return self._fallback, share, 1 / len(self._fallback)
        rows, weights = torch.cat(self._samples[expert]), torch.cat(self._weights[expert])
        return rows, weights, float(self.tokens[expert]) / len(rows)

    def moments_of(self, expert: int) -> tuple[tuple[Tensor, Tensor], int]:
        """Return the moments of the inputs of gate and up [D, D] and of down [F, F], and their tokens."""
        return (self.input_moments[expert], self.middle_moments[expert]), int(self.tokens[expert])


def calibrate_layer(
    slot: LoadedLayer, texts: TextStates, pool: Workers, has_moments: bool
) -> tuple[LayerInputs, dict[str, np.ndarray]]:
    """Move texts through the loaded layer. Returns what they hand to its experts, and counts of it.

    The counts are routes [T, K], weights [T, 2] and unimportance [UNIMPORTANCE_BINS], see `weight_summary`.
    """
    slot.begin_stack(texts)
    module, inputs = (
        slot.experts,
        LayerInputs(slot.model.layers[slot.layer].experts, slot.model.hidden_size, has_moments, slot.device),
    )
    routes, weights, unimportance = [], [], np.zeros(UNIMPORTANCE_BINS, np.int64)
    with _captured(module) as handed:

        def one(at: int) -> tuple[Tensor, ExpertInputs]:
            state, real = slot.forward(texts, at), texts.real(at).to(slot.device)
            with torch.inference_mode():
                parts = (argument[real].clone() for argument in handed.arguments)
                return state, ExpertInputs(*parts)

        # Passes run in parallel. Their results are added batch after batch, while the next passes run.
        for at, (state, batch) in enumerate(pool.in_order(one, range(len(texts.states)))):
            texts.states[at] = state
            inputs.add(module, batch, pool)
            routes.append(batch.chosen.cpu().numpy().astype(np.uint16))
            summary, counts = weight_summary(batch.weights.cpu())
            weights.append(summary.numpy())
            unimportance += counts
    counted = {"routes": np.concatenate(routes), "weights": np.concatenate(weights), "unimportance": unimportance}
    return inputs, {**counted, "tokens": inputs.tokens.numpy()}


class _Handed(threading.local):
    """Inputs, chosen experts and router weights that the pass of this thread handed to the experts."""

    arguments: tuple[Tensor, ...] = ()


@contextmanager
def _captured(module: Any) -> Iterator[_Handed]:
    handed = _Handed()

    def keep(module: Any, arguments: tuple[Tensor, ...]) -> None:
        handed.arguments = arguments[:3]

    handle = module.register_forward_pre_hook(keep)
    try:
        yield handed
    finally:
        handle.remove()
