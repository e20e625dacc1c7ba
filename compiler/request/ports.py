"""What the command line hands to a compile: the runtime that opens a bundle, and the measurement of lossy modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moec.evaluation.engine import TextEngine
from moec.evaluation.statistics import DistributionSummary
from moec.evaluation.tasks import Item, Task
from moec.manifests.model import ModelSpec


class BundleEngine(TextEngine, Protocol):
    """The runtime, opened on a bundle that is not published yet."""

    def forced_logits(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """Logits [A, V] that predict each answer token, the end token included."""
        ...


@runtime_checkable
class DivergingEngine(Protocol):
    """An engine that holds itself against the reference, so that no logits travel."""

    def divergence(self, pairs: Sequence[tuple[list[int], list[int]]]) -> DistributionSummary:
        """KL and agreement over the answer tokens of the pairs."""
        ...


OpenRuntime = Callable[[Path, int], AbstractContextManager[BundleEngine]]


@dataclass(frozen=True, slots=True)
class UnpublishedBundle:
    """What lossy modes are measured on. shots: solved examples; deciles: quality.unimportance_deciles; memory_bytes: of
    the runtime, 0: its own choice.
    """

    path: Path
    task: Task
    items: Sequence[Item]
    shots: Sequence[Item]
    deciles: Sequence[float]
    memory_bytes: int = 0


class MeasureModes(Protocol):
    """What quality.json says of a bundle's lossy modes."""

    def check(self, model: ModelSpec, has_low_versions: bool) -> None:
        """Before any work: refuse modes that the model, or a bundle without low versions, cannot have."""
        ...

    def __call__(self, bundle: UnpublishedBundle) -> dict[str, Any]:
        """The record of a bundle."""
        ...
