"""What reading ahead was worth: per layer, how many experts were predicted, read and used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class LayerAdvice:
    """Experts of one layer: read ahead, of these used before eviction; demanded, of these predicted."""

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
        """For `--json`."""
        return {**asdict(self), "precision": self.precision, "recall": self.recall}


@dataclass(slots=True)
class PrefetchQuality:
    """Per predicted layer: experts demanded, and of these the ones among the predicted top candidates."""

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
        """What advice was worth, per layer. first_expert: [L + 1]; prefetches: int64 [2, experts], read and used."""
        found = []
        for layer, (start, end) in enumerate(pairwise(first_expert)):
            read, used = prefetches[:, start:end].sum(axis=1).tolist()
            found.append(LayerAdvice(layer, read, used, self.demanded[layer], self.predicted[layer]))
        return found

    @property
    def recall(self) -> float | None:
        """Share of demanded experts that had been predicted; None if nothing was predicted."""
        total = sum(self.demanded.values())
        return sum(self.predicted.values()) / total if total else None
