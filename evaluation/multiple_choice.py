"""Evaluate tasks with given answers. Every answer is scored, and the likeliest one is the prediction."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from moec.manifests.errors import ExecutionError
from moec.manifests.progress import Progress

from . import statistics
from .engine import TextEngine
from .results import EvaluationResult, ItemResult, check_count, identity, rate
from .tasks import Item, Task


def evaluate_choices(
    task: Task, items: Sequence[Item], engine: TextEngine, shots: Sequence[Item], progress: Progress
) -> EvaluationResult:
    """Return accuracy by log-likelihood, and by log-likelihood per character of the answer. Ties: the first answer.

    Raises ExecutionError if the engine breaks its contract.
    """
    listed = [task.given_answers(item, shots) for item in items]
    pairs = [pair for choices, _ in listed for pair in choices]
    started = time.perf_counter()
    scored = engine.answer_log_probs(pairs, progress)
    seconds = time.perf_counter() - started
    check_count(len(scored), len(pairs))
    results, scores, at = [], dict[str, list[float]]((name, []) for name in task.metrics), 0
    for place, (item, (choices, right)) in enumerate(zip(items, listed, strict=True)):
        own = scored[at : at + len(choices)]
        at += len(choices)
        if not all(math.isfinite(score.nll) for score in own):
            raise ExecutionError(
                f"item {place}: the engine gave an answer an NLL that is not finite",
                "check the weights for values that are not numbers",
            )
        nll = np.array([score.nll for score in own])
        lengths = np.array([len(answer.strip()) for _, answer in choices])
        chosen = {"accuracy": int(nll.argmin()), "accuracy_by_length": int((nll / lengths).argmin())}
        for name in task.metrics:
            scores[name].append(float(chosen[name] == right))
        tokens = sum(score.tokens for score in own)
        prediction = choices[chosen[task.metric]][1].strip()
        results.append(ItemResult(prediction, task.reference(item), scores[task.metric][-1], tokens))
    primary = np.array(scores[task.metric])
    return EvaluationResult(
        task=task.name,
        metric=task.metric,
        value=float(primary.mean()),
        n=len(items),
        interval95=statistics.mean_interval95(primary),
        seconds=seconds,
        tokens_per_s=rate(sum(result.tokens for result in results), seconds),
        shots=len(shots),
        data_sha256=identity(task, items, shots, 0),
        other_metrics={name: float(np.mean(scores[name])) for name in task.metrics[1:]},
        items=tuple(results),
    )
