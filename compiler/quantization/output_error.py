"""Error that quantizing a projection causes in its outputs: routing-weighted squared error, from second moments alone.

Let x be the inputs, g their router weights, H = sum of g^2 x x^T, and D = W - W'. The squared error of g D x, summed
over all inputs, is trace(D H D^T).
Source: Optimal Brain Compression, section 3 (the layer-wise problem), with inputs weighted by routing.
Shapes: N rows, K columns; any leading batch dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def output_error(weight: Tensor, quantized_weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Return trace(D H D^T) with D = weight - quantized_weight, in the unit of the outputs squared, float32 [...].

    weight, quantized_weight: [..., N, K].
    second_moment: [..., K, K] symmetric, or None for the identity.
    """
    return row_errors(weight, quantized_weight, second_moment).sum(-1)


def row_errors(weight: Tensor, quantized_weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Return the part of each output row in `output_error`, float32 [..., N], never below 0."""
    difference = weight.float() - quantized_weight.float()
    if second_moment is None:
        return difference.square().sum(-1)
    weighted = torch.matmul(difference, second_moment.float())
    return weighted.mul_(difference).sum(-1).clamp_min_(0.0)


def relative_output_error(weight: Tensor, quantized_weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Return sqrt(trace(D H D^T) / trace(W H W^T)), float32 [...]: error over the outputs' norm, 0 for W = 0."""
    error = output_error(weight, quantized_weight, second_moment)
    size = output_error(weight, torch.zeros_like(weight), second_moment)
    return torch.where(size > 0, error / size, torch.zeros_like(size)).sqrt()
