"""Interfaces that the command line supplies to a compile: the runtime, and the measurement of lossy modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moec.evaluation.engine import TextEngine
from moec.evaluation.tasks import Item, Task
from moec.evaluation.tasks.task_settings import Templates
from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import CheckpointError
from moec.manifests.model import ModelSpec
from moec.manifests.progress import Progress
from moec.manifests.self_test import SelfTest


class RoutingRecord(Protocol):
    """The routing of the T tokens of a text in one layer."""

    @property
    def inputs(self) -> np.ndarray:
        """Return what the router reads, float32 [T, D]."""

    @property
    def logits(self) -> np.ndarray:
        """Return the router's logits, float32 [T, E]."""

    @property
    def chosen(self) -> np.ndarray:
        """Return the chosen experts, int32 [T, K]."""

    @property
    def foreseen(self) -> Mapping[int, np.ndarray]:
        """Return the logits of later routers for this layer's stream, float32 [T, E], by distance."""


class LocalEngine(TextEngine, Protocol):
    """The runtime in this process, on a bundle that is not published yet. Its logits and its routing can be seen."""

    def force_answers(
        self, pairs: Sequence[tuple[list[int], list[int]]], take: Callable[[int, np.ndarray], None], progress: Progress
    ) -> None:
        """Compute the logits that predict each answer token, the end token included.

        take: takes the index of a pair and the next rows of its logits, float32 [n, V], which it must not keep.
        progress: called with finished pairs and all pairs.
        """
        ...

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of prompts and answers."""
        ...

    def self_test(self) -> SelfTest | None:
        """Return a few texts and the digest of their logits; None where another machine may compute other bits."""
        ...

    def recorded_routing(self, texts: Iterable[Sequence[int]]) -> Iterator[Mapping[int, RoutingRecord]]:
        """Yield the routing of each text by layer. A text has 2 tokens or more."""
        ...


OpenRuntime = Callable[[Path, int], AbstractContextManager[LocalEngine]]
OpenEngine = Callable[[Path, int], AbstractContextManager[TextEngine]]
"""Opens the runtime here or on a cluster."""

OpenTemplates = Callable[[Path], Templates]
"""Opens the templates of prompts for the model in a folder."""

CheckCompanions = Callable[[Path], Sequence[CheckpointError]]
"""Returns what the runtime would refuse in the files next to the weights of a folder."""


@dataclass(frozen=True, slots=True)
class UnpublishedBundle:
    """The bundle and items on which lossy modes are measured.

    path: folder of the bundle.
    items: items to measure.
    shots: solved examples.
    deciles: quality.unimportance_deciles.
    hobbit_thresholds: T1 and T2 of calibration, see manifests/hobbit_thresholds.py; empty without calibration.
    memory_bytes: memory of the runtime. 0: the runtime decides.
    """

    path: Path
    task: Task
    items: Sequence[Item]
    shots: Sequence[Item]
    deciles: Sequence[float]
    memory_bytes: int = 0
    hobbit_thresholds: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class ModesWork:
    """Work of a measurement of lossy modes, for a forecast.

    settings: number of settings, the exact one included; 0: nothing is measured.
    divergence_items, divergence_tokens: items whose answers have a KL, and the most tokens of one answer.
    kept_logits: most logits of these answers that are kept, float32.
    timed_prompts: prompts whose time is measured.
    cached_share: share of the experts that the cache holds.
    """

    settings: int
    divergence_items: int
    divergence_tokens: int
    kept_logits: int
    timed_prompts: int
    cached_share: float


@dataclass(frozen=True, slots=True, eq=False)
class RoutedText:
    """The experts that the tokens of a text chose.

    prompt_tokens: tokens of the prompt, which run in one pass. Every later token has a pass of its own.
    chosen: experts of the T tokens by layer that routes, int32 [T, K], best first.
    """

    prompt_tokens: int
    chosen: Mapping[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class FittedEviction:
    """Weights of HOBBIT's eviction score, fitted to texts.

    weights: by name of the term; their sum is 1.
    is_better: whether they read fewer bytes on held-out texts than the default weights, the 95 % interval included.
    record: what quality.json says of them.
    """

    weights: Mapping[str, float]
    is_better: bool
    record: Mapping[str, Any]


FitEviction = Callable[
    [Path, Sequence[RoutedText], Sequence[RoutedText], Callable[[int, int], None]], FittedEviction | None
]
"""(bundle, training texts, held-out texts, progress) -> weights of HOBBIT's eviction, by replays against caches.

The weights read the fewest bytes on the training texts; None if caches hold all experts.
The bundle is not published yet. `progress` is called with (replays done, replays in all).
"""


class CardPicture(Protocol):
    """A picture of the model card, a file of the bundle."""

    @property
    def name(self) -> str:
        """Return the name of the file."""

    @property
    def title(self) -> str:
        """Return what it shows."""

    @property
    def data(self) -> bytes:
        """Return the content of the file."""


DrawCard = Callable[[BundleManifest, Mapping[str, Any]], Sequence[CardPicture]]
"""Draws the pictures of the model card from the manifest and the content of quality.json."""


class MeasureModes(Protocol):
    """Measures the lossy modes of a bundle for quality.json."""

    def check(self, model: ModelSpec, has_low_versions: bool) -> None:
        """Refuse, before any work, modes that the model does not support, or that need low versions."""
        ...

    def work(self, model: ModelSpec, has_low_versions: bool) -> ModesWork:
        """Return what the measurement does at most. Raises OptionError like `check`."""
        ...

    def __call__(self, bundle: UnpublishedBundle) -> dict[str, Any]:
        """Return the record of a bundle."""
        ...
