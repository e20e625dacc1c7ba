"""Trials: a plan is measured. Nothing here predicts.

There are two measurements:
* mean KL to the unquantized model on the answer tokens of a few validation items, layer by layer;
* the task metric on answers that the runtime generates from a temporary bundle, which a loss target is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from moec.evaluation.data import ItemSet
from moec.evaluation.engine import TextEngine, no_progress
from moec.evaluation.results import EvaluationResult
from moec.evaluation.run import evaluate, joined
from moec.evaluation.statistics import DistributionSummary, LossEstimate, loss_from_json, summary_from_json
from moec.evaluation.tasks import Item, Task
from moec.manifests.errors import OptionError
from moec.manifests.progress import Progress
from moec.profiles.freed_memory import give_back_freed_memory

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan, plain_plan
from ..workspace.journal import Journal
from .acceptance import LEVELS, Level, is_clear, items_for_precision, keeps, kl_bound, loss_so_far, may_be_kept
from .answer_walk import AnswerMeasures, AnswerMeter

# A measurement on generated answers looks after these numbers of items, and stops if the result is already clear.
LOOKS = (500, 1000)


class OpenPlans(Protocol):
    """Opens the runtime on the bundle of a plan."""

    def opened(self, plan: CompilePlan, store: UnitStore | None) -> AbstractContextManager[TextEngine]:
        """Return an engine that answers like the plan.

        store: quantized units. None for a plan without any.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskData:
    """One task of the target.

    validation: items of the search.
    certification_items: number of items of the certificate.
    shots: solved examples before each item.
    spare: train items that neither calibration nor gradients use. The search takes some if validation is too few.
    """

    task: Task
    validation: ItemSet
    certification_items: int
    shots: tuple[Item, ...] = ()
    spare: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured plan, as quality.json lists it."""

    purpose: str
    expert_packed_bytes: int
    dense_packed_bytes: int
    bits_per_weight: float
    kl: DistributionSummary | None = None
    losses: dict[str, LossEstimate] = field(default_factory=dict)
    accepted: bool | None = None

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "purpose": self.purpose,
            "expert_packed_bytes": self.expert_packed_bytes,
            "dense_packed_bytes": self.dense_packed_bytes,
            "bits_per_weight": self.bits_per_weight,
            "kl": None if self.kl is None else self.kl.to_json(),
            "losses": {task: estimate.to_json() for task, estimate in self.losses.items()},
            "accepted": self.accepted,
        }


@dataclass(eq=False)
class Trials:
    """Measures plans of one model, and records every measurement in `log`.

    walk: measures answers; None without data.
    bundles: opens the runtime on plans.
    store: quantized units.
    progress: called with (items done, items in all).
    journal: stores the results.
    decisions: stores the results that no other search shares. These are losses of generated answers, which stop where
        they are clear, and how many spare items are taken.
    held_out_texts: number of texts in the held-out KL of each task.
    """

    walk: AnswerMeter | None
    bundles: OpenPlans
    store: UnitStore
    tasks: Sequence[TaskData]
    progress: Progress
    journal: Journal
    decisions: Journal
    held_out_texts: Sequence[int] = ()
    log: list[Trial] = field(init=False, default_factory=list)
    _items: dict[str, int] = field(init=False, default_factory=dict)
    _baselines: dict[str, EvaluationResult] = field(init=False, default_factory=dict)

    @property
    def measured_items(self) -> int:
        """Items of all measurements so far. A measurement counts once, also if an earlier run made it."""
        return sum(self._items.values())

    @property
    def kl_texts(self) -> int:
        """Number of items of one KL."""
        return 0 if self.walk is None else len(self.walk.answers.counts)

    @property
    def tokens_per_text(self) -> float:
        """Mean length of the texts for the KL, in tokens."""
        return 0.0 if self.walk is None else self.walk.answers.texts.num_tokens / max(self.kl_texts, 1)

    @property
    def certification_items(self) -> dict[str, int]:
        """Number of items in the certificate of each task."""
        return {data.task.name: data.certification_items for data in self.tasks}

    @property
    def available_items(self) -> dict[str, tuple[int, int]]:
        """Number of validation items of each task, and of those with the spare ones."""
        sizes = {data.task.name: (len(data.validation.items), len(data.spare)) for data in self.tasks}
        return {name: (validation, validation + spare) for name, (validation, spare) in sizes.items()}

    @property
    def first_kl_per_loss(self) -> float:
        """First guess of KL over relative loss.

        A perplexity rises by about the KL. For generated answers, the example has these values:
        * 2 % loss: 0.002 nats per token;
        * 5 % loss: 0.007 nats per token;
        * 45 % loss: 0.015 nats per token.
        """
        return 1.0 if all(data.task.is_perplexity for data in self.tasks) else 0.1

    @property
    def has_data(self) -> bool:
        """True if plans can be measured."""
        return self.walk is not None

    def _measures(self) -> AnswerMeter:
        """Return what measures answers. Raises OptionError without data."""
        if self.walk is None:
            raise OptionError("this measurement needs task data", "add `--data`, or take `--size` or `--uniform`")
        return self.walk

    def kl(self, plan: CompilePlan, purpose: str, store: UnitStore | None = None) -> DistributionSummary:
        """Return the mean KL to the unquantized model on answer tokens, nats per token.

        store: quantized units, or None for those of this object.
        """
        return self.kl_each([plan], [purpose], store)[0]

    def known_kl(self, plan: CompilePlan) -> float | None:
        """Return the mean KL of a plan that was measured, or None."""
        stage = f"kl-{plan.digest}"
        return None if self.journal.get(stage) is None else float(self.journal.json(stage, _not_measured)["mean"])

    def kl_bound(self, summary: DistributionSummary, level: Level = LEVELS[0]) -> float:
        """Return the bound of a KL by which the search accepts a plan, see `acceptance.kl_bound`."""
        measured = self._measures().answers.tasks
        return kl_bound(summary, list(zip(measured, self.held_out_texts, strict=True)), level)

    def kl_each(
        self, plans: Sequence[CompilePlan], purposes: Sequence[str], store: UnitStore | None = None
    ) -> list[DistributionSummary]:
        """Return `kl` of each plan. The journal's missing measurements may run at the same time."""
        walk = self._measures()
        counts, tasks = walk.answers.counts, walk.answers.tasks
        stages = [f"kl-{plan.digest}" for plan in plans]
        plain = self._journaled(stages, plans, store, None, lambda measures: measures.summary(counts, tasks).to_json())
        summaries = []
        for plan, purpose, stage, values in zip(plans, purposes, stages, plain, strict=True):
            self._items[stage] = len(counts)
            summaries.append(summary_from_json(values))
            self._log(plan, purpose, kl=summaries[-1])
        return summaries

    def answer_nll_each(
        self, plans: Sequence[CompilePlan], store: UnitStore, items: int, progress: Progress
    ) -> list[float]:
        """Return the mean NLL of the answers of the first validation items of the first task, nats per token.

        progress: called with (plans done, plans in all).
        """
        count = min(items, self._measures().answers.tasks[0])
        stages = [f"nll-{plan.digest}-{items}" for plan in plans]
        self._items.update(dict.fromkeys(stages, count))
        return self._journaled(stages, plans, store, count, lambda measures: float(measures.nll.mean()), progress)

    def _journaled(
        self,
        stages: Sequence[str],
        plans: Sequence[CompilePlan],
        store: UnitStore | None,
        items: int | None,
        value: Callable[[AnswerMeasures], Any],
        progress: Progress = no_progress,
    ) -> list[Any]:
        """Return a value of each plan from the journal, after the missing ones are measured."""
        missing = {stage: at for at, stage in enumerate(stages) if self.journal.get(stage) is None}
        jobs = ((plans[at], store or self.store) for at in missing.values())
        done = len(plans) - len(missing)
        for stage, measures in zip(missing, self._measures().measure_each(jobs, items), strict=True):
            self.journal.json(stage, partial(value, measures))
            done += 1
            progress(done, len(plans))
        return [self.journal.json(stage, _not_measured) for stage in stages]

    def baseline(self, data: TaskData) -> EvaluationResult:
        """Return the result of the unquantized model on the validation items of one task."""
        name = data.task.name
        if name not in self._baselines:
            stage, items = f"baseline-{name}", data.validation.items
            plain = self.journal.json(stage, lambda: self._measure_baseline(data, items).to_json(per_item=True))
            self._items[stage] = len(items)
            self._baselines[name] = EvaluationResult.from_json(plain)
        return self._baselines[name]

    def _measure_baseline(self, data: TaskData, items: Sequence[Item]) -> EvaluationResult:
        with self.unquantized() as engine:
            return evaluate(data.task, items, engine, shots=data.shots, progress=self.progress)

    def unquantized(self) -> AbstractContextManager[TextEngine]:
        """Return an engine that answers like the checkpoint."""
        self.release()
        lowering = self.store.lowering
        return self.bundles.opened(plain_plan(lowering.model, lowering.spec_16bit, self.store.quantizer), None)

    def planned(self, plan: CompilePlan, store: UnitStore | None = None) -> AbstractContextManager[TextEngine]:
        """Return an engine that answers like a plan.

        store: quantized units, or None for those of this object.
        """
        self.release()
        return self.bundles.opened(plan, store or self.store)

    def release(self) -> None:
        """Give back memory that only measurements of answers need."""
        if self.walk is not None:
            self.walk.release()

    def close(self) -> None:
        """Give back all memory. No answers are measured afterwards."""
        self.walk = None
        give_back_freed_memory()

    def require_baselines(self) -> None:
        """Measure the unquantized model on every task.

        Raises OptionError if its score is 0, so that it has nothing to lose.
        """
        for data in self.tasks:
            baseline = self.baseline(data)
            loss_so_far(data.task, baseline, [baseline])

    def accepts(
        self, plan: CompilePlan, target: float, purpose: str, store: UnitStore | None = None
    ) -> tuple[bool, dict[str, LossEstimate]]:
        """Return whether every task keeps the target on generated answers, as `keeps` judges it, and the losses."""

        def each_keeps(losses: Mapping[str, LossEstimate]) -> bool:
            return len(losses) == len(self.tasks) and all(
                keeps(losses[data.task.name], target, data.certification_items) for data in self.tasks
            )

        return self.judged(plan, target, purpose, each_keeps, store)

    def judged(
        self,
        plan: CompilePlan,
        target: float,
        purpose: str,
        accepts: Callable[[Mapping[str, LossEstimate]], bool],
        store: UnitStore | None = None,
    ) -> tuple[bool, dict[str, LossEstimate]]:
        """Return a judgement of the losses of generated answers, and the losses.

        accepts: called with the loss of each task. Tasks after the first that no rule would accept are missing.
        """
        if not self.tasks:
            raise OptionError("a loss target needs task data", "give `--data`, or take `--bits-per-weight` or `--size`")
        for data in self.tasks:
            self.baseline(data)
        stage = f"loss-{plan.digest}-{target}"
        plain = self.decisions.json(
            stage, lambda: {task: loss.to_json() for task, loss in self._measure_losses(plan, target, store).items()}
        )
        losses = {task: loss_from_json(values) for task, values in plain.items()}
        self._items[stage] = sum(loss.n for loss in losses.values())
        for data in self.tasks:
            self._baseline_with_spare(data, target)  # counts its items, also in a resumed run
        accepted = accepts(losses)
        self._log(plan, purpose, losses=losses, accepted=accepted)
        return accepted, losses

    def _measure_losses(self, plan: CompilePlan, target: float, store: UnitStore | None) -> dict[str, LossEstimate]:
        """Return the loss per task. Stop after the first task that no rule would accept.

        The first plan that is near the target decides how many spare items are taken. It is then measured again.
        """
        while True:
            losses: dict[str, LossEstimate] = {}
            for data in self.tasks:
                self._baseline_with_spare(data, target)  # before the plan's engine is open
            with self.planned(plan, store) as engine:
                for data in self.tasks:
                    losses[data.task.name] = self._measure(data, target, engine)
                    if not may_be_kept(losses[data.task.name], target):
                        break
            measured = [data for data in self.tasks if data.task.name in losses]
            if not any([self._take_spare(data, losses[data.task.name], target) for data in measured]):
                return losses

    def _take_spare(self, data: TaskData, loss: LossEstimate, target: float) -> bool:
        """Choose how many spare items make the standard error PRECISION times the target. Return whether there are any.

        The number is chosen once for each task and target, so that all later plans are measured alike.
        """
        is_decided = bool(self._taken(data, target)) or is_clear(loss, target, data.certification_items)
        needed = min(items_for_precision(loss, target) - loss.n, len(data.spare))
        if is_decided or needed <= 0:
            return False
        self.decisions.json(_spare_stage(data, target), lambda: needed)
        return True

    def _taken(self, data: TaskData, target: float) -> int:
        """Return the number of spare items that are taken."""
        stage = _spare_stage(data, target)
        return 0 if self.decisions.get(stage) is None else int(self.decisions.json(stage, _not_measured))

    def _baseline_with_spare(self, data: TaskData, target: float) -> EvaluationResult:
        """Return the result of the unquantized model on the validation items and the spare ones that are taken."""
        first, count = self.baseline(data), self._taken(data, target)
        if not count:
            return first
        stage, items = f"baseline-{data.task.name}-{count}", data.spare[:count]
        if stage not in self._baselines:
            plain = self.journal.json(stage, lambda: self._measure_baseline(data, items).to_json(per_item=True))
            parts = [first, EvaluationResult.from_json(plain)]
            self._items[stage] = count
            self._baselines[stage] = joined(data.task, [*data.validation.items, *items], parts, data.shots)
        return self._baselines[stage]

    def _measure(self, data: TaskData, target: float, engine: TextEngine) -> LossEstimate:
        """Return the loss on validation, and on the spare items that are taken. Stop early where it is clear."""
        baseline, taken = self._baseline_with_spare(data, target), self._taken(data, target)
        validated, items = len(data.validation.items), [*data.validation.items, *data.spare[:taken]]
        results: list[EvaluationResult] = []
        drafts = [data.task.continuation(item.prediction) for item in baseline.items]
        done = 0
        for look in dict.fromkeys([*(n for n in LOOKS if n < validated), validated, len(items)]):
            new_items, guesses = items[done:look], drafts[done:look]
            results.append(
                evaluate(data.task, new_items, engine, shots=data.shots, drafts=guesses, progress=self.progress)
            )
            done = look
            if look < len(items) and not np.any(baseline.scores[:look]):
                continue  # the checkpoint solves none of them, so nothing can be lost yet
            estimate = loss_so_far(data.task, baseline, results)
            if is_clear(estimate, target, data.certification_items):
                break
        return estimate

    def _log(
        self,
        plan: CompilePlan,
        purpose: str,
        kl: DistributionSummary | None = None,
        losses: dict[str, LossEstimate] | None = None,
        accepted: bool | None = None,
    ) -> None:
        self.log.append(
            Trial(
                purpose, plan.expert_packed_bytes, plan.dense_packed_bytes, plan.bits_per_weight, kl, losses or {},
                accepted,
            )
        )  # fmt: skip


def _spare_stage(data: TaskData, target: float) -> str:
    """Return the stage of the journal that keeps how many spare items are taken."""
    return f"spare-{data.task.name}-{target}"


def _not_measured() -> Any:
    raise RuntimeError("the journal lost a result that it has just stored")
