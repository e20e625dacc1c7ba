"""A plan measured where the model does not fit in memory.

Its KL to the unquantized model layer by layer, the whole model read once; generated answers by a bundle in passing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moec.evaluation.engine import TextEngine
from moec.evaluation.statistics import DistributionSummary, distribution_summary
from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress

from ..families import Lowering
from ..quantization.unit_store import UnitStore
from ..reference.weights import WeightName
from ..request.plan import CompilePlan
from ..request.ports import BundleEngine, OpenRuntime
from ..sensitivity.sensitivity import plain_plan
from ..sensitivity.trials import TaskData, Trials
from ..workspace.journal import Journal
from ..workspace.parallel import one_torch_thread, workers
from .plan_bundles import UNQUANTIZED, PlanBundles
from .slot import LayerSlot, OutputHead, TextStates, divergences
from .store import layer_units
from .sweep import SweepInputs, SweepResult


class StreamedTrials(Trials):
    """Trials of a model that is never in memory as a whole. tasks: of a loss target, none for others."""

    def __init__(
        self,
        lowering: Lowering,
        inputs: SweepInputs,
        found: SweepResult,
        progress: Progress,
        journal: Journal,
        threads: int,
        tasks: Sequence[TaskData],
        bundles: PlanBundles,
    ) -> None:
        super().__init__(None, found.store, tasks, 0, progress, journal)
        self._bundles = bundles
        self._inputs, self._answers, self._threads = inputs, found.answers, threads
        self.lowering = lowering
        self._slot: LayerSlot | None = None

    @property
    def open_runtime(self) -> OpenRuntime:
        """How bundles are made to answer."""
        return self._bundles.open_runtime

    @property
    def has_data(self) -> bool:
        return bool(self._inputs.answers.rows)

    def close(self) -> None:
        """Give back the layer's memory; nothing is measured after it."""
        self._slot = None

    @contextmanager
    def unquantized(self, share: int = 1) -> Iterator[BundleEngine]:
        """As in Trials. share: a part of the memory for runtimes, one of so many."""
        plain = plain_plan(self.lowering.model, self.lowering.spec_16bit, self.store.quantizer)
        with self._bundles.opened(plain, UNQUANTIZED, share) as engine:
            yield engine

    @contextmanager
    def planned(self, plan: CompilePlan, store: UnitStore | None = None) -> Iterator[TextEngine]:
        if store not in (None, self.store):
            raise ValueError("a bundle takes its units from this store")
        self.close()  # the layer's memory is the runtime's now
        with self._bundles.opened(plan) as engine:
            yield engine

    def _measure_kl(self, plan: CompilePlan, store: UnitStore | None) -> DistributionSummary:
        source, layers = store or self.store, plan.model.num_layers
        slot = self._slot = self._slot or LayerSlot(self.lowering)
        embedding = self._dense(plan, source, "embedding")
        texts = TextStates.begin(self._inputs.answers.rows, lambda ids: slot.embed(ids, embedding))
        with workers(self._threads) as pool:
            for layer in range(layers):
                slot.load(layer, self._replaced(plan, source, slot, layer))
                slot.run([texts], pool, lambda: None)
                self.progress(layer + 1, layers)
        states = slot.normed(texts.answers(self._inputs.answers.counts))
        own = slot.head()
        other = self._dense(plan, source, "embedding" if plan.model.tie_embeddings else "lm_head")
        return self._summary(states, own if other is None else replace(own, matrix=other), own)

    def _replaced(
        self, plan: CompilePlan, source: UnitStore, slot: LayerSlot, layer: int
    ) -> Mapping[WeightName, Tensor]:
        """Dense weights of the layer below 16 bits; those of the experts are set one at a time."""
        weights: dict[WeightName, Tensor] = {}
        for name in slot.dense_names(layer):
            weight = self._dense(plan, source, name)
            if weight is not None:
                weights[name] = weight
        return _Units(plan, source, layer, weights)

    def _dense(self, plan: CompilePlan, source: UnitStore, name: str) -> Tensor | None:
        spec = plan.dense[name]
        return None if spec.bitwidth == 16 else source.dense_weight(name, spec)

    def _summary(self, states: Tensor, head: OutputHead, own: OutputHead) -> DistributionSummary:
        with one_torch_thread():  # the same bits whatever the processors
            parts = list(divergences(states, self._answers, head, own))
        items = np.repeat(np.arange(len(self._inputs.answers.counts)), self._inputs.answers.counts)
        kl = torch.cat([kl for kl, _ in parts]).double().numpy()
        agrees = torch.cat([same for _, same in parts]).numpy()
        return distribution_summary(kl, agrees, items)


class _Units(Mapping[WeightName, Tensor]):
    """Weights of one layer as a plan stores them, made when asked for: one expert is held at a time."""

    def __init__(self, plan: CompilePlan, source: UnitStore, layer: int, dense: Mapping[WeightName, Tensor]) -> None:
        self._plan, self._source, self._dense = plan, source, dense
        self._units = dict.fromkeys(u for u in layer_units(plan.model, layer) if plan.units[u].bitwidth < 16)

    def __len__(self) -> int:
        return len(self._dense) + len(self._units)

    def __iter__(self) -> Iterator[WeightName]:
        yield from self._dense
        yield from self._units

    def __contains__(self, name: object) -> bool:
        return name in self._dense or name in self._units

    def __getitem__(self, name: WeightName) -> Tensor:
        if isinstance(name, UnitKey):
            return self._source.weight(name, self._plan.units[name])
        return self._dense[name]
