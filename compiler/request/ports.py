"""Interfaces that the command line supplies to a compile: the runtime, and the measurement of lossy modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moec.evaluation.engine import TextEngine
from moec.evaluation.tasks import Item, Task
from moec.evaluation.tasks.task_settings import Templates
from moec.manifests.model import ModelSpec


class BundleEngine(TextEngine, Protocol):
    """The runtime, opened on a bundle that is not published yet."""

    def forced_logits(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """Return the logits [A, V] that predict each answer token, the end token included."""
        ...


OpenRuntime = Callable[[Path, int], AbstractContextManager[BundleEngine]]

OpenTemplates = Callable[[Path], Templates]
"""Opens the templates of prompts for the model in a folder."""


@dataclass(frozen=True, slots=True)
class UnpublishedBundle:
    """The bundle and items on which lossy modes are measured.

    path: folder of the bundle.
    task: the task.
    items: items to measure.
    shots: solved examples.
    deciles: quality.unimportance_deciles.
    memory_bytes: memory of the runtime. 0: the runtime decides.
    """

    path: Path
    task: Task
    items: Sequence[Item]
    shots: Sequence[Item]
    deciles: Sequence[float]
    memory_bytes: int = 0


class MeasureModes(Protocol):
    """Measures the lossy modes of a bundle for quality.json."""

    def check(self, model: ModelSpec, has_low_versions: bool) -> None:
        """Refuse, before any work, modes that the model does not support, or that need low versions."""
        ...

    def __call__(self, bundle: UnpublishedBundle) -> dict[str, Any]:
        """Return the record of a bundle."""
        ...
