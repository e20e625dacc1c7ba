"""Routing-weighted second moments of the inputs of each projection. GPTQ and the output error are computed from them.

Shapes: L layers, E experts, D hidden, F expert width, K columns of a projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec


class SecondMoments:
    """Sums of g^2 x x^T per layer and expert, where g is the router weight of the expert for the token with input x.

    Gate and up have the same inputs and share a matrix. The matrices are float32 sums, not means: the trace of D H D^T
    is
    an error over all tokens seen.
    """

    def __init__(self, inputs: Sequence[Tensor], intermediates: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Take the sums of each layer.

        inputs: [E, D, D] per layer, of gate and up.
        intermediates: [E, F, F] per layer, of down.
        counts: int64 [E] per layer, tokens of each expert.
        """
        self._inputs, self._intermediates, self._counts = list(inputs), list(intermediates), list(counts)

    @classmethod
    def zeros(cls, model: ModelSpec) -> SecondMoments:
        """Return moments without any token."""
        experts, hidden = [layer.experts for layer in model.layers], model.hidden_size
        return cls(
            [torch.zeros(e.count, hidden, hidden) for e in experts],
            [torch.zeros(e.count, e.width, e.width) for e in experts],
            [torch.zeros(e.count, dtype=torch.int64) for e in experts],
        )

    def add(self, layer: int, expert: int, inputs: Tensor, intermediates: Tensor) -> None:
        """Add tokens of one expert.

        inputs: [n, D], times the router weights.
        intermediates: [n, F], times the router weights.
        """
        self._inputs[layer][expert].addmm_(inputs.T, inputs)
        self._intermediates[layer][expert].addmm_(intermediates.T, intermediates)
        self._counts[layer][expert] += len(inputs)

    def of(self, layer: int, projection: str) -> Tensor:
        """Return the moments of one projection of all experts of a layer, [E, K, K]. Raises ValueError."""
        if projection not in PROJECTIONS:
            raise ValueError(f"no projection `{projection}`, expected one of {', '.join(PROJECTIONS)}")
        return self._intermediates[layer] if projection == "down" else self._inputs[layer]

    def tokens(self, layer: int) -> Tensor:
        """Return the tokens that each expert has seen, int64 [E]."""
        return self._counts[layer]

    def unseen(self) -> tuple[ExpertKey, ...]:
        """Return the experts without a token. Their projections are rounded without input weights."""
        return tuple(
            ExpertKey(layer, expert)
            for layer, counts in enumerate(self._counts)
            for expert in torch.nonzero(counts == 0).flatten().tolist()
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return name -> array, for the journal."""
        arrays = {}
        for layer, (inputs, intermediates, counts) in enumerate(
            zip(self._inputs, self._intermediates, self._counts, strict=True)
        ):
            arrays[f"second_moments.{layer}.inputs"] = inputs.numpy()
            arrays[f"second_moments.{layer}.intermediates"] = intermediates.numpy()
            arrays[f"second_moments.{layer}.tokens"] = counts.numpy()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> SecondMoments:
        """Rebuild from the result of `to_arrays`. Other names are ignored. Raises KeyError if a part is missing."""
        layers = sum(name.startswith("second_moments.") and name.endswith(".tokens") for name in arrays)
        parts = [
            [torch.from_numpy(np.array(arrays[f"second_moments.{layer}.{part}"])) for layer in range(layers)]
            for part in ("inputs", "intermediates", "tokens")
        ]
        return cls(*parts)
