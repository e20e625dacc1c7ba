"""The price of rounding each projection of one expert: its inputs, and the gradient at the sum of the layer's experts.

Shapes: N tokens of all texts, n tokens of an expert, D hidden, K top-k, S formats, P projections of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..reference.expert_module import activated, first_products, projections_of

LEAST_TOKENS = 32
"""Least number of tokens of an expert that may be pruned. With fewer, too little is known."""
Restored = Callable[[UnitKey, QuantSpec], Tensor | None]
"""The weights of a unit as a format stores them, float32; None if the format does not hold its values."""


@dataclass(slots=True)
class HandedTokens:
    """Inputs that real tokens handed to the experts of a layer.

    inputs: [N, D].
    chosen: experts, [N, K].
    weights: router weights, [N, K].
    gradients: gradient at the sum of the experts' outputs, [N, D] of each sketch.
    """

    inputs: Tensor
    chosen: Tensor
    weights: Tensor
    gradients: list[Tensor]


@dataclass(frozen=True, slots=True)
class HandedTexts:
    """Inputs that all texts handed to the experts of a layer.

    texts: the text of each token, int64 [N], in host memory.
    """

    tokens: HandedTokens
    texts: Tensor
    num_texts: int

    def to_arrays(self) -> list[np.ndarray]:
        """Return plain arrays for another machine."""
        tokens = self.tokens
        parts = [tokens.inputs, tokens.chosen, tokens.weights, self.texts, *tokens.gradients]
        return [tensor.contiguous().numpy() for tensor in parts]

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray], num_texts: int) -> HandedTexts:
        """Rebuild from the result of `to_arrays`."""
        inputs, chosen, weights, texts, *gradients = (torch.tensor(array) for array in arrays)
        return cls(HandedTokens(inputs, chosen, weights, gradients), texts, num_texts)


def expert_squares(
    module: Any, unit_of: Callable[[str], UnitKey], handed: HandedTexts, specs: Sequence[QuantSpec], restored: Restored
) -> np.ndarray:
    """Return the sum over texts and sketches of (sum over tokens of d . D x)^2, float64 [P, S], see fisher.py.

    An entry is NaN without a price: a format does not fit or hold the unit, or the expert has no tokens. Pruning an
    expert with fewer than LEAST_TOKENS has no price either.
    module: the experts of the layer.
    unit_of: the expert's unit of a projection.
    """
    expert, handed_tokens = unit_of("down").expert, handed.tokens
    original = projections_of(module, expert)
    squares = np.zeros((len(original), len(specs)))
    tokens, rank = torch.where(handed_tokens.chosen == expert)
    if not len(tokens):
        return np.full_like(squares, np.nan)
    rows, weights = handed_tokens.inputs[tokens], handed_tokens.weights[tokens, rank].unsqueeze(1)
    products = {name: product.requires_grad_() for name, product in first_products(module, expert, rows).items()}
    middle = activated(module, expert, products)
    gradients: dict[str, list[Tensor]] = {name: [] for name in original}
    for number, upstream in enumerate(handed_tokens.gradients):
        down = upstream[tokens] * weights
        keep = number + 1 < len(handed_tokens.gradients)
        first = torch.autograd.grad(middle, list(products.values()), down @ original["down"], retain_graph=keep)
        for name, gradient in zip(original, (*first, down), strict=True):
            gradients[name].append(gradient)
    inputs, texts = {**dict.fromkeys(products, rows), "down": middle.detach()}, handed.texts[tokens.cpu()]
    with torch.no_grad():
        for row, name in enumerate(original):
            for column, spec in enumerate(specs):
                is_known = len(tokens) >= LEAST_TOKENS or not spec.is_pruned
                # A format must fit. Pruning is priced for the down projection alone.
                has_price = is_known and spec.fits(original[name].shape[1]) and (name == "down" or not spec.is_pruned)
                other = None
                if has_price:
                    other = torch.zeros(()) if spec.is_pruned else restored(unit_of(name), spec)
                if other is None:
                    squares[row, column] = np.nan
                    continue
                moved = inputs[name] @ (other.to(rows.device) - original[name]).T
                for gradient in gradients[name]:
                    # Added up in host memory: on other devices, the order of `index_add_` may vary.
                    sums = (moved * gradient).sum(1, dtype=torch.float64).cpu()
                    totals = torch.zeros(handed.num_texts, dtype=torch.float64)
                    squares[row, column] += float(totals.index_add_(0, texts, sums).square().sum())
    return squares
