"""Quality of reading ahead: how many experts of each layer were predicted, read and used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class LayerAdvice:
    """Numbers of experts of one layer.

    read: read ahead.
    used: read ahead and used before eviction.
    demanded: requested by the layer.
    predicted: requested by the layer and predicted.
    """

    layer: int
    read: int
    used: int
    demanded: int
    predicted: int

    @property
    def precision(self) -> float | None:
        """Share of the experts read ahead that were used."""
        return self.used / self.read if self.read else None

    @property
    def recall(self) -> float | None:
        """Share of the demanded experts that had been predicted."""
        return self.predicted / self.demanded if self.demanded else None

    def to_plain(self) -> dict[str, float | None]:
        return {**asdict(self), "precision": self.precision, "recall": self.recall}


@dataclass(slots=True)
class PrefetchQuality:
    """Demanded experts of each layer, and how many of them were among the predicted candidates."""

    demanded: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    predicted: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def observe(self, layer: int, predicted: set[int], demanded: Collection[int]) -> None:
        """Count one layer of one pass."""
        self.add(layer, len(demanded), sum(expert in predicted for expert in demanded))

    def add(self, layer: int, demanded: int, predicted: int) -> None:
        """Count experts of one layer of one pass, and how many of them had been predicted."""
        self.demanded[layer] += demanded
        self.predicted[layer] += predicted

    def layers(self, first_expert: Sequence[int], prefetches: np.ndarray) -> list[LayerAdvice]:
        """Return the quality of advice for each layer.

        first_expert: offset of each layer's experts, [L + 1].
        prefetches: experts read ahead and used, int64 [2, experts].
        """
        layers = []
        for layer, (start, end) in enumerate(pairwise(first_expert)):
            read, used = prefetches[:, start:end].sum(axis=1).tolist()
            layers.append(LayerAdvice(layer, read, used, self.demanded[layer], self.predicted[layer]))
        return layers

    @property
    def recall(self) -> float | None:
        """Share of demanded experts that had been predicted; None if nothing was predicted."""
        total = sum(self.demanded.values())
        return sum(self.predicted.values()) / total if total else None
