"""Trials on workers: the same measurements from the same batches; those that wait for no other run at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest
from moec.evaluation.statistics import DistributionSummary
from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..sensitivity.trials import Trials
from .jobs import Weights
from .remote import RemoteModel
from .wire import Handle, to_plain

T = TypeVar("T")
Wanted = deque[tuple[CompilePlan, bool]]
"""Plans that were asked for and not given yet, and whether workers measure them."""
Held = dict[tuple[UnitKey | str, QuantSpec], Handle]


@dataclass(eq=False)
class ClusterTrials(Trials):
    """Trials whose reference model is on workers."""

    model: RemoteModel
    _handles: WeakKeyDictionary[UnitStore, Held] = field(init=False, default_factory=WeakKeyDictionary)
    _measured_kl: dict[str, DistributionSummary] = field(init=False, default_factory=dict)
    _measured_nll: dict[str, list[AnswerScore]] = field(init=False, default_factory=dict)

    def weights_of(self, plan: CompilePlan, store: UnitStore | None = None) -> Mapping[UnitKey | str, Handle]:
        """Handles of the codes of everything the plan stores below 16 bits, each put into the cluster once."""
        source = store or self.store
        held = self._handles.setdefault(source, {})
        wanted: dict[UnitKey | str, QuantSpec] = {u: spec for u, spec in plan.units.items() if spec.bitwidth < 16}
        wanted.update({name: spec for name, spec in plan.dense.items() if spec.bitwidth < 16})
        for name, spec in wanted.items():
            if (name, spec) not in held:
                matrix = source.matrix(name, spec) if isinstance(name, UnitKey) else source.dense_matrix(name, spec)
                held[(name, spec)] = self.model.pool.put(to_plain(matrix))
        return {name: held[(name, spec)] for name, spec in wanted.items()}

    def kl_each(self, plans: Iterable[tuple[CompilePlan, str]]) -> Iterator[DistributionSummary]:
        """`kl` of each plan with its purpose, in order; all that the journal does not have are measured at once."""
        purposes: deque[str] = deque()

        def bare() -> Iterator[CompilePlan]:
            for plan, purpose in plans:
                purposes.append(purpose)
                yield plan

        wanted: Wanted = deque()
        missing = self._missing(bare(), "kl-{}", wanted, self.store)
        for plan in self._in_turn(wanted, self.model.divergence_each(missing, self._pairs), self._measured_kl):
            yield self.kl(plan, purposes.popleft())

    def answer_nll_each(self, plans: Iterable[CompilePlan], store: UnitStore, items: int) -> Iterator[float]:
        """`answer_nll` of each plan, in order; all that the journal does not have are measured at once."""
        data = self.tasks[0]
        texts = [(data.task.prompt(i, data.shots), data.task.answer(i)) for i in data.validation.items[:items]]
        wanted: Wanted = deque()
        missing = self._missing(plans, f"nll-{{}}-{items}", wanted, store)
        for plan in self._in_turn(wanted, self.model.score_each(missing, texts), self._measured_nll):
            yield self.answer_nll(plan, store, items)

    def _missing(self, plans: Iterable[CompilePlan], stage: str, wanted: Wanted, store: UnitStore) -> Iterator[Handle]:
        """Weights of the plans that are to be measured; `wanted` receives every plan. stage: its name, around a digest.

        A plan that comes a second time is in the journal when its turn comes.
        """
        seen: set[str] = set()
        for plan in plans:
            is_missing = plan.digest not in seen and self.journal.get(stage.format(plan.digest)) is None
            seen.add(plan.digest)
            wanted.append((plan, is_missing))
            if is_missing:
                yield self.model.pool.put(Weights(self.weights_of(plan, store)))

    def _in_turn(self, wanted: Wanted, found: Iterator[T], measured: dict[str, T]) -> Iterator[CompilePlan]:
        """The plans in order, each once what was found of it is in `measured` or it is in the journal."""
        for result in found:
            while not wanted[0][1]:
                yield wanted.popleft()[0]
            plan = wanted.popleft()[0]
            measured[plan.digest] = result
            yield plan
        while wanted:
            yield wanted.popleft()[0]

    def _measure_kl(self, plan: CompilePlan, store: UnitStore | None) -> DistributionSummary:
        if plan.digest not in self._measured_kl:
            weights = self.model.pool.put(Weights(self.weights_of(plan, store)))
            (self._measured_kl[plan.digest],) = self.model.divergence_each([weights], self._pairs)
        return self._measured_kl.pop(plan.digest)

    def _measure_nll(self, plan: CompilePlan, store: UnitStore, items: int) -> float:
        if plan.digest not in self._measured_nll:
            return super()._measure_nll(plan, store, items)
        return self._mean_nll(_Scored(self._measured_nll.pop(plan.digest)), items)


class _Scored:
    """An engine that has been asked already."""

    def __init__(self, scores: list[AnswerScore]) -> None:
        self._scores = scores

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress) -> list[AnswerScore]:
        return self._scores

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[Generation]:
        raise NotImplementedError("only answers were scored")
