"""Trials: a plan applied to the reference model and measured. Nothing here predicts.

Two measurements: mean KL to the unquantized model on the answer tokens of a few validation items (seconds), and the
task metric on generated answers (what a loss target speaks of).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from moec.evaluation.data import ItemSet
from moec.evaluation.engine import TextEngine
from moec.evaluation.run import EvaluationResult, evaluate
from moec.evaluation.statistics import (
    DistributionSummary,
    LossEstimate,
    accepts,
    distribution_summary,
    perplexity_loss,
    relative_loss,
)
from moec.evaluation.tasks import Item, Task
from moec.manifests.errors import OptionError
from moec.manifests.model import UnitKey

from .plan import CompilePlan
from .unit_store import UnitStore

# A generated measurement looks after these many items and stops where the answer is already clear.
LOOKS = (500, 1000)
CLEAR_STANDARD_ERRORS = 3.0
# Enough for a standard error; the certificate takes five times as many.
TRIAL_RESAMPLES = 2000
Progress = Callable[[int, int], None]


class Reference(TextEngine, Protocol):
    """What a trial needs of the reference model (compiler.reference.ReferenceModel)."""

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]: ...

    def forced_logits(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]: ...

    def weights(self, mapping: dict[UnitKey | str, torch.Tensor]) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class TaskData:
    """One task of the target: items to search on, and solved examples put in front of each."""

    task: Task
    validation: ItemSet
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
        """Plain values."""
        return {
            "purpose": self.purpose,
            "expert_packed_bytes": self.expert_packed_bytes,
            "dense_packed_bytes": self.dense_packed_bytes,
            "bits_per_weight": self.bits_per_weight,
            "kl": None if self.kl is None else self.kl.to_json(),
            "losses": {task: estimate.to_json() for task, estimate in self.losses.items()},
            "accepted": self.accepted,
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Row-wise, float64 inside, float32 out."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def divergence(reference: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL(reference || logits) per row in nats, and whether the top-1 tokens agree. Both [A, V] logits."""
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    kl = np.sum(np.exp(log_p.astype(np.float64)) * (log_p - log_q), axis=1)
    return np.maximum(kl, 0.0), np.argmax(log_p, axis=1) == np.argmax(log_q, axis=1)


def summarise_divergence(references: Sequence[np.ndarray], logits: Sequence[np.ndarray]) -> DistributionSummary:
    """KL and agreement over the answer tokens of several items."""
    parts = [divergence(r, q) for r, q in zip(references, logits, strict=True)]
    items = np.concatenate([np.full(len(kl), i) for i, (kl, _) in enumerate(parts)])
    return distribution_summary(np.concatenate([kl for kl, _ in parts]), np.concatenate([s for _, s in parts]), items)


class Trials:
    """Applies plans to one reference model; every measurement is kept in `log`."""

    def __init__(
        self, reference: Reference, store: UnitStore, tasks: Sequence[TaskData], kl_items: int, progress: Progress
    ) -> None:
        self.reference, self.store, self.tasks = reference, store, tasks
        self.log: list[Trial] = []
        self._progress = progress
        self._pairs = [
            reference.encode_pair(data.task.prompt(item, data.shots), data.task.answer(item))
            for data in tasks
            for item in data.validation.items[: max(1, kl_items // len(tasks))]
        ]
        self._reference_logits = reference.forced_logits(self._pairs) if self._pairs else []
        self._baselines: dict[str, EvaluationResult] = {}
        self._kl_cache: dict[tuple[object, ...], DistributionSummary] = {}

    @property
    def has_data(self) -> bool:
        """Whether anything can be measured."""
        return bool(self._pairs)

    def weights_of(self, plan: CompilePlan, store: UnitStore | None = None) -> dict[UnitKey | str, torch.Tensor]:
        """Dequantized weights of everything the plan stores below 16 bits."""
        source = store or self.store
        units = {u: source.weight(u, s) for u, s in plan.units.items() if s.bitwidth < 16}
        dense = {n: source.dense_weight(n, s) for n, s in plan.dense.items() if s.bitwidth < 16}
        return {**units, **dense}

    def kl(self, plan: CompilePlan, purpose: str, store: UnitStore | None = None) -> DistributionSummary:
        """Mean KL to the reference on answer tokens, nats per token."""
        key = (plan.quantizer, tuple(plan.units.values()), tuple(plan.dense.values()))
        if key not in self._kl_cache:
            with self.reference.weights(self.weights_of(plan, store)):
                logits = self.reference.forced_logits(self._pairs)
            self._kl_cache[key] = summarise_divergence(self._reference_logits, logits)
        summary = self._kl_cache[key]
        self._log(plan, purpose, kl=summary)
        return summary

    def baseline(self, data: TaskData) -> EvaluationResult:
        """The unquantized model on the validation items of one task."""
        if data.task.name not in self._baselines:
            self._baselines[data.task.name] = evaluate(
                data.task, data.validation.items, self.reference, shots=data.shots, progress=self._progress
            )
        return self._baselines[data.task.name]

    def accepts(
        self, plan: CompilePlan, target: float, purpose: str, store: UnitStore | None = None
    ) -> tuple[bool, dict[str, LossEstimate]]:
        """Whether every task's loss plus one standard error is within the target, measured on generated answers."""
        if not self.tasks:
            raise OptionError("a loss target needs task data", "give `--data`, or take `--bits-per-weight` or `--size`")
        losses: dict[str, LossEstimate] = {}
        for data in self.tasks:
            self.baseline(data)
        with self.reference.weights(self.weights_of(plan, store)):
            for data in self.tasks:
                losses[data.task.name] = self._measure(data, target)
                if not accepts(losses[data.task.name], target):
                    break
        accepted = len(losses) == len(self.tasks) and all(accepts(loss, target) for loss in losses.values())
        self._log(plan, purpose, losses=losses, accepted=accepted)
        return accepted, losses

    def _measure(self, data: TaskData, target: float) -> LossEstimate:
        """Loss on validation; stops early where it is CLEAR_STANDARD_ERRORS away from the target."""
        baseline, items, done = self.baseline(data), data.validation.items, 0
        results: list[EvaluationResult] = []
        drafts = [" " + item.prediction for item in baseline.items]
        while True:
            look = next((n for n in LOOKS if done < n < len(items)), len(items))
            part = items[done:look]
            results.append(
                evaluate(
                    data.task, part, self.reference, shots=data.shots, drafts=drafts[done:look], progress=self._progress
                )
            )
            done = look
            estimate = loss_so_far(data.task, baseline, results)
            distance = abs(estimate.loss - target)
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


def loss_so_far(task: Task, baseline: EvaluationResult, parts: Sequence[EvaluationResult]) -> LossEstimate:
    """Relative loss on the items measured so far, paired with the first ones of the baseline."""
    scores = np.concatenate([part.scores for part in parts])
    count = len(scores)
    if task.answer_field is None:
        nll, tokens = (np.concatenate([getattr(part, name) for part in parts]) for name in ("nll", "tokens"))
        return perplexity_loss(baseline.nll[:count], baseline.tokens[:count], nll, tokens, TRIAL_RESAMPLES)
    return relative_loss(
        baseline.scores[:count], scores, task.higher_is_better, task.score_range, resamples=TRIAL_RESAMPLES
    )
