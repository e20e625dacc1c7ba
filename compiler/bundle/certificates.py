"""The certificate of one task, and of the KL on one task's answers.

The runtime runs the written bundle on items that no other stage uses. Its results are compared with those of the
unquantized model. `certify.py` makes the certificates of all tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.evaluation.data import ItemSet
from moec.evaluation.divergence import divergence as token_divergences
from moec.evaluation.engine import TextEngine
from moec.evaluation.results import EvaluationResult
from moec.evaluation.run import compare, evaluate, joined
from moec.evaluation.statistics import (
    ERROR,
    DistributionSummary,
    LossEstimate,
    Verdict,
    distribution_summary,
    judge,
)
from moec.evaluation.tasks import Item, Task

from ..request.options import Talk
from ..request.ports import BundleEngine
from ..request.targets import Target
from ..walker.limits import LOGITS_AT_ONCE

LOOKS = (500, 1000, 2000, 4000)

MODES_ITEMS = 500
"""Held-out items for the measurement of lossy modes, one sequence at a time."""


@dataclass(frozen=True, slots=True)
class TaskCertificate:
    """One task on held-out items.

    baseline: result of the checkpoint.
    value: result of the bundle.
    loss: relative loss, or None if the baseline scores 0.
    verdict: verdict on the loss, or None if the target is not a loss.
    divergence: KL and agreement.
    settings: what differs from the task's own definition, such as the digest of a chat template.
    """

    baseline: EvaluationResult
    value: EvaluationResult
    loss: LossEstimate | None
    verdict: Verdict | None
    divergence: DistributionSummary
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the entry of the task in quality.json. Without times, equal bundles have equal reports."""
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
            **({"settings": dict(self.settings)} if self.settings else {}),
        }


@dataclass(frozen=True, slots=True)
class DivergenceCertificate:
    """KL on one task's held-out answers, for a reference that scores answers and generates none.

    divergence: KL and agreement.
    items: number of answers.
    """

    divergence: DistributionSummary
    items: int


def certify_divergence(
    task: str,
    pairs: Sequence[tuple[list[int], list[int]]],
    reference_log_probs: Callable[[int, int], list[np.ndarray]],
    vocab_size: int,
    engine: BundleEngine,
    talk: Talk,
) -> DivergenceCertificate:
    """Compare the bundle with the reference on answers, as many at a time as LOGITS_AT_ONCE allows.

    reference_log_probs: log probabilities [A, V] of the pairs from one index to another.
    """
    progress, parts = talk.progress(f"KL on {task}"), list[tuple[np.ndarray, np.ndarray]]()
    end = 0
    while end < len(pairs):
        start, end = end, end + 1
        rows = [(len(answer) + 1) * vocab_size for _, answer in pairs[start:]]  # the end token is scored too
        held = rows[0]
        while end < len(pairs) and held + rows[end - start] <= LOGITS_AT_ONCE:
            held += rows[end - start]
            end += 1
        logits, own = engine.forced_logits(pairs[start:end]), reference_log_probs(start, end)
        parts += [token_divergences(log_p, found) for log_p, found in zip(own, logits, strict=True)]
        del logits, own  # free them before the next ones are made
        progress(end, len(pairs))
    items = np.repeat(np.arange(len(parts)), [len(kl) for kl, _ in parts])
    kl, agrees = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    return DivergenceCertificate(distribution_summary(kl, agrees, items), len(parts))


@dataclass(frozen=True, slots=True)
class HeldOutTask:
    """A task and the items that only its certificate uses.

    shots: solved examples before each item.
    """

    task: Task
    items: ItemSet
    shots: tuple[Item, ...] = ()


def certify_task(
    held_out: HeldOutTask,
    reference: TextEngine,
    engine: BundleEngine,
    target: Target,
    talk: Talk,
    divergence: DistributionSummary,
    confidence: float | None = None,
) -> TaskCertificate:
    """Evaluate both engines, compare item by item, and judge the loss against the target.

    divergence: KL and agreement on held-out answers.
    confidence: confidence of a verdict that may come before the last item, after LOOKS items. Each look has a share of
        the error. None: one look at all items, at 95 %.
    """
    task, items, shots = held_out.task, held_out.items, held_out.shots
    counts = look_counts(len(items.items)) if confidence is not None and target.kind == "loss" else [len(items.items)]
    error = ERROR if confidence is None else (1 - confidence) / len(counts)
    parts: tuple[list[EvaluationResult], list[EvaluationResult]] = ([], [])
    for before, count in itertools.pairwise([0, *counts]):
        chosen, title = items.items[before:count], f"{task.name}, items {before + 1} to {count}"
        own = evaluate(task, chosen, reference, shots=shots, progress=talk.progress(f"baseline on {title}"))
        drafts = [task.continuation(item.prediction) for item in own.items]
        found = evaluate(task, chosen, engine, shots=shots, drafts=drafts, progress=talk.progress(f"bundle on {title}"))
        for part, result in zip(parts, (own, found), strict=True):
            part.append(result)
        baseline, value = (joined(task, items.items[:count], part, shots) for part in parts)
        # A checkpoint that solves no item has no relative loss, and needs another target.
        is_stated = target.kind == "loss" or baseline.value > 0
        loss = compare(task, baseline, value, error=error) if is_stated else None
        verdict = judge(loss, target.value) if loss is not None and target.kind == "loss" else None
        if verdict is not None and (verdict.supported or verdict.refuted):
            break
    return TaskCertificate(baseline, value, loss, verdict, divergence, task.settings)


def look_counts(items: int) -> list[int]:
    """Return the numbers of items after which a certificate looks. The last look is at all items."""
    return [*(count for count in LOOKS if count < items), items]
