"""Routing-weighted second moments of what goes into each projection: what GPTQ and the output error are computed from.

Shapes: L layers, E experts, D hidden, F expert width, K columns of a projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec


class SecondMoments:
    """Sums of g^2 x x^T per layer and expert, with g the router weight of the expert for the token of input x.

    Gate and up share their inputs, so they share a matrix. float32; sums, not means: the trace of D H D^T is an error
    over all tokens seen.
    """

    def __init__(self, inputs: Sequence[Tensor], intermediates: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """inputs: [E, D, D] per layer, of gate and up. intermediates: [E, F, F], of down. counts: [E] int64."""
        self._inputs, self._intermediates, self._counts = list(inputs), list(intermediates), list(counts)

    @classmethod
    def zeros(cls, model: ModelSpec) -> SecondMoments:
        """Nothing seen yet."""
        experts, hidden = [layer.experts for layer in model.layers], model.hidden_size
        return cls(
            [torch.zeros(e.count, hidden, hidden) for e in experts],
            [torch.zeros(e.count, e.width, e.width) for e in experts],
            [torch.zeros(e.count, dtype=torch.int64) for e in experts],
        )

    def add(self, layer: int, expert: int, inputs: Tensor, intermediates: Tensor) -> None:
        """Add tokens of one expert. inputs: [n, D], intermediates: [n, F], both times the router weights."""
        self._inputs[layer][expert].addmm_(inputs.T, inputs)
        self._intermediates[layer][expert].addmm_(intermediates.T, intermediates)
        self._counts[layer][expert] += len(inputs)

    def of(self, layer: int, projection: str) -> Tensor:
        """The moments of one projection of all experts of a layer, [E, K, K]. Raises ValueError for another name."""
        if projection not in PROJECTIONS:
            raise ValueError(f"no projection `{projection}`, expected one of {', '.join(PROJECTIONS)}")
        return self._intermediates[layer] if projection == "down" else self._inputs[layer]

    def tokens(self, layer: int) -> Tensor:
        """Tokens each expert has seen, [E] int64."""
        return self._counts[layer]

    def unseen(self) -> tuple[ExpertKey, ...]:
        """Experts without a token: their projections are rounded without weighing inputs."""
        return tuple(
            ExpertKey(layer, expert)
            for layer, counts in enumerate(self._counts)
            for expert in torch.nonzero(counts == 0).flatten().tolist()
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Name -> array, for the journal."""
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
        """Rebuild what `to_arrays` gave; other names are passed over. Raises KeyError if a part is missing."""
        layers = sum(name.startswith("second_moments.") and name.endswith(".tokens") for name in arrays)
        parts = [
            [torch.from_numpy(np.array(arrays[f"second_moments.{layer}.{part}"])) for layer in range(layers)]
            for part in ("inputs", "intermediates", "tokens")
        ]
        return cls(*parts)
