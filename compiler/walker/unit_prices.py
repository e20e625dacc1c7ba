"""What rounding each projection of one expert costs: its inputs, and the gradient at the sum of the layer's experts.

Shapes: N tokens of all texts, n of an expert, D hidden, F expert width, K top-k, S formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec

from ..reference.expert_module import gated, projection_of
from ..search.pruning import LEAST_TOKENS
from ..sensitivity.fisher import is_asked

Restored = Callable[[UnitKey, QuantSpec], Tensor]
"""The weights of a unit as a format stores them, float32."""


@dataclass(slots=True)
class HandedTokens:
    """What real tokens handed to the experts of a layer: inputs [N, D], chosen [N, K], weights [N, K], and the gradient
    at the sum of their outputs, [N, D] of each sketch.
    """

    inputs: Tensor
    chosen: Tensor
    weights: Tensor
    gradients: list[Tensor]


@dataclass(frozen=True, slots=True)
class HandedTexts:
    """The same of all texts together. texts: int64 [N], of which text each token is; num_texts: of how many."""

    tokens: HandedTokens
    texts: Tensor
    num_texts: int

    def to_arrays(self) -> list[np.ndarray]:
        """On its way to another machine."""
        own = self.tokens
        parts = [own.inputs, own.chosen, own.weights, self.texts, *own.gradients]
        return [part.contiguous().numpy() for part in parts]

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray], num_texts: int) -> HandedTexts:
        """The inverse of `to_arrays`."""
        inputs, chosen, weights, texts, *gradients = (torch.tensor(array) for array in arrays)
        return cls(HandedTokens(inputs, chosen, weights, gradients), texts, num_texts)


def expert_squares(
    module: Any, unit_of: Callable[[str], UnitKey], handed: HandedTexts, specs: Sequence[QuantSpec], restored: Restored
) -> np.ndarray:
    """Sum over texts and sketches of (sum over tokens of d . D x)^2, [3, S]; NaN for what is not asked or known.

    module: the layer's experts; unit_of: the expert's unit of a projection. Nothing is known of an expert without
    tokens; of leaving one out, with fewer than LEAST_TOKENS.
    """
    expert, own = unit_of("down").expert, handed.tokens
    squares = np.zeros((len(PROJECTIONS), len(specs)))
    tokens, rank = torch.where(own.chosen == expert)
    if not len(tokens):
        return np.full_like(squares, np.nan)
    rows, weights = own.inputs[tokens], own.weights[tokens, rank].unsqueeze(1)
    original = {name: projection_of(module, expert, name) for name in PROJECTIONS}
    gate, up = ((rows @ original[name].T).requires_grad_() for name in ("gate", "up"))
    middle = gated(module, expert, gate, up)
    inputs = {"gate": rows, "up": rows, "down": middle.detach()}
    gradients: dict[str, list[Tensor]] = {name: [] for name in PROJECTIONS}
    for number, behind in enumerate(own.gradients):
        down = behind[tokens] * weights
        keep = number + 1 < len(own.gradients)
        found = torch.autograd.grad(middle, (gate, up), down @ original["down"], retain_graph=keep)
        for name, gradient in zip(PROJECTIONS, (*found, down), strict=True):
            gradients[name].append(gradient)
    with torch.no_grad():
        for row, name in enumerate(PROJECTIONS):
            for column, spec in enumerate(specs):
                is_known = len(tokens) >= LEAST_TOKENS or not spec.is_pruned
                if not is_known or not is_asked(name, spec, original[name].shape[1]):
                    squares[row, column] = np.nan
                    continue
                other = 0.0 if spec.is_pruned else restored(unit_of(name), spec)
                moved = inputs[name] @ (other - original[name]).T
                for gradient in gradients[name]:
                    sums = (moved * gradient).sum(1, dtype=torch.float64)
                    totals = torch.zeros(handed.num_texts, dtype=torch.float64)
                    squares[row, column] += float(totals.index_add_(0, handed.texts[tokens], sums).square().sum())
    return squares
