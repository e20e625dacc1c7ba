"""Certify: the emitted bundle, run by the runtime that ships, against the reference on items nothing else saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from moec.evaluation.data import ItemSet
from moec.evaluation.engine import TextEngine
from moec.evaluation.run import EvaluationResult, compare, evaluate
from moec.evaluation.statistics import DistributionSummary, LossEstimate, Verdict, judge
from moec.evaluation.tasks import Item, Task

from .options import Talk
from .targets import Target
from .trials import Reference, log_softmax, summarise_divergence

# KL and agreement are means over tokens and need fewer items than a task metric.
KL_ITEMS = 500


class BundleEngine(TextEngine, Protocol):
    """The runtime, opened on a bundle that is not published yet."""

    def forced_logits(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """Logits [A, V] that predict each answer token, the end token included."""
        ...


OpenRuntime = Callable[[Path], AbstractContextManager[BundleEngine]]


@dataclass(frozen=True, slots=True)
class TaskCertificate:
    """One task on held-out items. verdict: None where the target is not a loss; loss: None where the baseline is 0."""

    baseline: EvaluationResult
    value: EvaluationResult
    loss: LossEstimate | None
    verdict: Verdict | None
    divergence: DistributionSummary

    def to_json(self) -> dict[str, object]:
        """What quality.json says of the task; no time, so that equal bundles have equal reports."""
        return {
            "metric": self.value.metric,
            "n": self.value.n,
            "baseline": self.baseline.value,
            "baseline_interval95": list(self.baseline.interval95),
            "value": self.value.value,
            "value_interval95": list(self.value.interval95),
            "other_metrics": {
                name: {"baseline": self.baseline.other_metrics[name], "value": value}
                for name, value in self.value.other_metrics.items()
            },
            "loss": None if self.loss is None else self.loss.to_json(),
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "kl": self.divergence.to_json(),
            "data_sha256": self.value.data_sha256,
        }


def certify_task(
    task: Task,
    items: ItemSet,
    shots: tuple[Item, ...],
    reference: Reference,
    engine: BundleEngine,
    target: Target,
    talk: Talk,
) -> TaskCertificate:
    """Evaluate both on all items, compare item by item, and hold the loss against the target."""
    baseline = evaluate(task, items.items, reference, shots=shots, progress=talk.progress(f"baseline on {task.name}"))
    drafts = [" " + item.prediction for item in baseline.items]
    value = evaluate(
        task, items.items, engine, shots=shots, drafts=drafts, progress=talk.progress(f"bundle on {task.name}")
    )
    pairs = [reference.encode_pair(task.prompt(item, shots), task.answer(item)) for item in items.items[:KL_ITEMS]]
    log_p = [log_softmax(rows) for rows in reference.forced_logits(pairs)]
    divergence = summarise_divergence(log_p, engine.forced_logits(pairs))
    if target.kind == "loss":
        loss = compare(baseline, value)
        return TaskCertificate(baseline, value, loss, judge(loss, target.value), divergence)
    # A checkpoint that solves nothing takes another target than a loss: there is none to state.
    estimate = compare(baseline, value) if baseline.value > 0 else None
    return TaskCertificate(baseline, value, estimate, None, divergence)
