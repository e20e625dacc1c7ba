"""Trials: a plan is applied to the reference model and measured. Nothing here predicts.

There are two measurements:
- mean KL to the unquantized model on the answer tokens of a few validation items, in seconds;
- the task metric on generated answers, which a loss target is about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from moec.evaluation.data import ItemSet
from moec.evaluation.divergence import log_softmax, summarise_divergence
from moec.evaluation.engine import TextEngine
from moec.evaluation.results import EvaluationResult
from moec.evaluation.run import answer_scores, evaluate
from moec.evaluation.statistics import (
    ONE_SIDED_95,
    DistributionSummary,
    LossEstimate,
    perplexity_loss,
    relative_loss,
)
from moec.evaluation.tasks import Item, Task
from moec.manifests.errors import OptionError
from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..workspace.journal import Journal

# A measurement on generated answers looks after these numbers of items, and stops if the result is already clear.
LOOKS = (500, 1000)
CLEAR_STANDARD_ERRORS = 3.0
# Enough for a standard error. The certificate uses five times as many.
TRIAL_RESAMPLES = 2000


class Reference(TextEngine, Protocol):
    """Methods of the reference model that a trial needs (compiler.reference.ReferenceModel)."""

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]: ...

    def forced_logits(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]: ...

    def weights(self, mapping: Mapping[UnitKey | str, Any]) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class TaskData:
    """One task of the target.

    task: the task.
    validation: items of the search.
    certification_items: number of items of the certificate.
    shots: solved examples before each item.
    """

    task: Task
    validation: ItemSet
    certification_items: int
    shots: tuple[Item, ...] = ()


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
    """Applies plans to one reference model, and records every measurement in `log`.

    model: the reference model, or None without data.
    store: quantized units.
    tasks: the tasks.
    kl_items: validation items for the KL, over all tasks.
    progress: called with (items done, items in all).
    journal: stores the results.
    """

    model: Reference | None
    store: UnitStore
    tasks: Sequence[TaskData]
    kl_items: int
    progress: Progress
    journal: Journal
    log: list[Trial] = field(init=False, default_factory=list)
    _items: dict[str, int] = field(init=False, default_factory=dict)
    _pairs: list[tuple[list[int], list[int]]] = field(init=False, default_factory=list)
    _reference_log_p: list[np.ndarray] = field(init=False, default_factory=list)
    _baselines: dict[str, EvaluationResult] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.model is not None:
            self._pairs = [
                self.model.encode_pair(data.task.prompt(item, data.shots), data.task.answer(item))
                for data in self.tasks
                for item in data.validation.items[: max(1, self.kl_items // len(self.tasks))]
            ]

    @property
    def measured_items(self) -> int:
        """Items of all measurements so far. A measurement counts once, also if an earlier run made it."""
        return sum(self._items.values())

    @property
    def kl_texts(self) -> int:
        """Number of items of one KL."""
        return len(self._pairs)

    @property
    def tokens_per_text(self) -> float:
        """Mean length of the texts for the KL, in tokens."""
        return sum(len(prompt) + len(answer) for prompt, answer in self._pairs) / max(len(self._pairs), 1)

    @property
    def certification_items(self) -> dict[str, int]:
        """Number of items in the certificate of each task."""
        return {data.task.name: data.certification_items for data in self.tasks}

    @property
    def first_kl_per_loss(self) -> float:
        """First guess of KL over relative loss.

        A perplexity rises by about the KL. For generated answers, the example has these values:
        - 2 % loss: 0.002 nats per token;
        - 5 % loss: 0.007 nats per token;
        - 45 % loss: 0.015 nats per token.
        """
        return 1.0 if all(data.task.answer_field is None for data in self.tasks) else 0.1

    @property
    def has_data(self) -> bool:
        """Whether anything can be measured."""
        return bool(self._pairs)

    @property
    def reference(self) -> Reference:
        """The model of the trials. Raises OptionError without data."""
        if self.model is None:
            raise OptionError("this measurement needs task data", "add `--data`, or take `--size` or `--uniform`")
        return self.model

    def weights_of(self, plan: CompilePlan, store: UnitStore | None = None) -> Mapping[UnitKey | str, Any]:
        """Return dequantized weights of everything below 16 bits in the plan, in the form of `reference.weights`."""
        source = store or self.store
        weights: dict[UnitKey | str, torch.Tensor] = {
            unit: source.weight(unit, spec) for unit, spec in plan.units.items() if spec.bitwidth < 16
        }
        weights.update({name: source.dense_weight(name, s) for name, s in plan.dense.items() if s.bitwidth < 16})
        return weights

    def kl(self, plan: CompilePlan, purpose: str, store: UnitStore | None = None) -> DistributionSummary:
        """Return the mean KL to the reference on answer tokens, nats per token."""
        stage = f"kl-{plan.digest}"
        plain = self.journal.json(stage, lambda: self._measure_kl(plan, store).to_json())
        self._items[stage] = len(self._pairs)
        summary = DistributionSummary(**{**plain, "standard_error": _told(plain["standard_error"], math.inf)})
        self._log(plan, purpose, kl=summary)
        return summary

    def _measure_kl(self, plan: CompilePlan, store: UnitStore | None) -> DistributionSummary:
        if not self._reference_log_p:
            self._reference_log_p = [log_softmax(rows) for rows in self.reference.forced_logits(self._pairs)]
        with self.reference.weights(self.weights_of(plan, store)):
            return summarise_divergence(self._reference_log_p, self.reference.forced_logits(self._pairs))

    def answer_nll(self, plan: CompilePlan, store: UnitStore, items: int) -> float:
        """Return the mean NLL of the reference answers of the first validation items, nats per token."""

        stage = f"nll-{plan.digest}-{items}"
        self._items[stage] = min(items, len(self.tasks[0].validation.items))
        return float(self.journal.json(stage, lambda: self._measure_nll(plan, store, items)))

    def _measure_nll(self, plan: CompilePlan, store: UnitStore, items: int) -> float:
        with self.reference.weights(self.weights_of(plan, store)):
            return self._mean_nll(self.reference, items)

    def _mean_nll(self, engine: TextEngine, items: int) -> float:
        data = self.tasks[0]
        scores = answer_scores(data.task, data.validation.items[:items], engine, shots=data.shots)
        return sum(score.nll for score in scores) / max(sum(score.tokens for score in scores), 1)

    # Independent measurements: one after the other here, in parallel on a cluster.

    def kl_each(self, plans: Iterable[tuple[CompilePlan, str]]) -> Iterator[DistributionSummary]:
        """Yield `kl` of each plan with its purpose, in order."""
        for plan, purpose in plans:
            yield self.kl(plan, purpose)

    def answer_nll_each(self, plans: Iterable[CompilePlan], store: UnitStore, items: int) -> Iterator[float]:
        """Yield `answer_nll` of each plan, in order."""
        for plan in plans:
            yield self.answer_nll(plan, store, items)

    def baseline(self, data: TaskData) -> EvaluationResult:
        """Return the result of the unquantized model on the validation items of one task."""
        name = data.task.name
        if name not in self._baselines:
            stage = f"baseline-{name}"
            plain = self.journal.json(stage, lambda: self._measure_baseline(data).to_json(per_item=True))
            self._items[stage] = len(data.validation.items)
            self._baselines[name] = EvaluationResult.from_json(plain)
        return self._baselines[name]

    def _measure_baseline(self, data: TaskData) -> EvaluationResult:
        with self.unquantized() as engine:
            return evaluate(data.task, data.validation.items, engine, shots=data.shots, progress=self.progress)

    @contextmanager
    def unquantized(self) -> Iterator[TextEngine]:
        """Yield an engine that answers like the checkpoint."""
        yield self.reference

    @contextmanager
    def planned(self, plan: CompilePlan, store: UnitStore | None = None) -> Iterator[TextEngine]:
        """Yield an engine that answers like a plan.

        store: quantized units, or None for those of this object.
        """
        with self.reference.weights(self.weights_of(plan, store)):
            yield self.reference

    def close(self) -> None:
        """Release resources that only measurements need. No measurement may follow."""

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
        if not self.tasks:
            raise OptionError("a loss target needs task data", "give `--data`, or take `--bits-per-weight` or `--size`")
        for data in self.tasks:
            self.baseline(data)
        stage = f"loss-{plan.digest}-{target}"
        plain = self.journal.json(
            stage, lambda: {task: loss.to_json() for task, loss in self._measure_losses(plan, target, store).items()}
        )
        losses = {task: _estimate(values) for task, values in plain.items()}
        self._items[stage] = sum(loss.n for loss in losses.values())
        accepted = len(losses) == len(self.tasks) and all(
            keeps(losses[data.task.name], target, data.certification_items) for data in self.tasks
        )
        self._log(plan, purpose, losses=losses, accepted=accepted)
        return accepted, losses

    def _measure_losses(self, plan: CompilePlan, target: float, store: UnitStore | None) -> dict[str, LossEstimate]:
        """Return the loss per task. Stop after the first task that does not keep the target."""
        losses: dict[str, LossEstimate] = {}
        with self.planned(plan, store) as engine:
            for data in self.tasks:
                losses[data.task.name] = self._measure(data, target, engine)
                if not keeps(losses[data.task.name], target, data.certification_items):
                    break
        return losses

    def _measure(self, data: TaskData, target: float, engine: TextEngine) -> LossEstimate:
        """Return the loss on validation. Stop early at CLEAR_STANDARD_ERRORS from the decision."""
        baseline, items, done = self.baseline(data), data.validation.items, 0
        results: list[EvaluationResult] = []
        drafts = [" " + item.prediction for item in baseline.items]
        while True:
            look = next((n for n in LOOKS if done < n < len(items)), len(items))
            part, guesses = items[done:look], drafts[done:look]
            results.append(evaluate(data.task, part, engine, shots=data.shots, drafts=guesses, progress=self.progress))
            done = look
            estimate = loss_so_far(data.task, baseline, results)
            distance = abs(estimate.loss + margin(estimate, data.certification_items) - target)
            if done == len(items) or distance > CLEAR_STANDARD_ERRORS * estimate.standard_error > 0:
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


def _told(value: float | None, otherwise: float) -> float:
    """Return a number that JSON stores as null if it is not finite."""
    return otherwise if value is None else value


def _estimate(values: Mapping[str, Any]) -> LossEstimate:
    """Invert LossEstimate.to_json for the journal. A missing bound is infinite on its side."""
    low, high = values["interval95"]
    bounds = {
        "interval95": (_told(low, -math.inf), _told(high, math.inf)),
        "lower95": _told(values["lower95"], -math.inf),
        "upper95": _told(values["upper95"], math.inf),
        "standard_error": _told(values["standard_error"], math.inf),
    }
    return LossEstimate(**{**values, **bounds})


def margin(estimate: LossEstimate, certification_items: int) -> float:
    """Return the distance that a loss must keep from its target.

    It is one standard error on validation, plus the expected width of the certificate's one-sided 95 % bound on its own
    items. An accepted plan is then likely to be supported.
    """
    at_certification = estimate.standard_error * math.sqrt(estimate.n / max(certification_items, 1))
    return estimate.standard_error + ONE_SIDED_95 * at_certification


def keeps(estimate: LossEstimate, target: float, certification_items: int) -> bool:
    """Return whether the search accepts a loss. Acceptance implies loss + one standard error <= target."""
    return estimate.loss + margin(estimate, certification_items) <= target


def kl_bound(summary: DistributionSummary) -> float:
    """Return the upper one-sided 95 % bound of the mean. An accepted plan is then likely to be supported.

    With a single text, which has no spread, it is the mean itself.
    """
    width = ONE_SIDED_95 * summary.standard_error
    return summary.mean + (width if math.isfinite(width) else 0.0)


def loss_so_far(task: Task, baseline: EvaluationResult, parts: Sequence[EvaluationResult]) -> LossEstimate:
    """Return the relative loss on the items measured so far, paired with the first items of the baseline."""
    scores = np.concatenate([part.scores for part in parts])
    count = len(scores)
    if task.answer_field is None:
        nll, tokens = (np.concatenate([getattr(part, name) for part in parts]) for name in ("nll", "tokens"))
        return perplexity_loss(baseline.nll[:count], baseline.tokens[:count], nll, tokens, TRIAL_RESAMPLES)
    return relative_loss(
        baseline.scores[:count], scores, task.higher_is_better, task.score_range, resamples=TRIAL_RESAMPLES
    )
