"""Evaluate an engine on items, and compare two evaluations item by item."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moec.manifests.errors import ExecutionError, OptionError
from moec.manifests.progress import Progress

from . import statistics
from .engine import AnswerScore, Generation, GenerationRequest, TextEngine, no_progress
from .metrics import item_perplexities, perplexity
from .multiple_choice import evaluate_choices
from .results import EvaluationResult, ItemResult, check_count, identity, rate
from .statistics import LossEstimate
from .tasks import Item, Task


def evaluate(
    task: Task,
    items: Sequence[Item],
    engine: TextEngine,
    *,
    shots: Sequence[Item] = (),
    max_new_tokens: int | None = None,
    drafts: Sequence[str | None] | None = None,
    progress: Progress = no_progress,
) -> EvaluationResult:
    """Run the task on the items and score it.

    shots: solved examples before each item.
    max_new_tokens: most new tokens; None: the task's own limit.
    drafts: guesses of the continuations; None: the reference answers.
    An engine may verify a draft in one pass, and decode from the point where greedy decoding departs from it.
    The result is the same and faster. Use `[None] * n` to measure decoding without drafts.
    Raises OptionError for unusable arguments, ExecutionError if the engine breaks its contract.
    """
    if not items:
        raise OptionError("there are no items to evaluate", "give at least one")
    length = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    if task.is_perplexity:
        return _evaluate_text(task, items, engine, shots, progress)
    if task.choices is not None:
        return evaluate_choices(task, items, engine, shots, progress)
    if length < 1:
        raise OptionError(f"max_new_tokens must be at least 1, found {length}", "leave it out for the task's own")
    guesses = [task.answer(item) for item in items] if drafts is None else list(drafts)
    if len(guesses) != len(items):
        raise OptionError(f"there are {len(guesses)} drafts for {len(items)} items", "give one draft per item")
    requests = [
        GenerationRequest(task.prompt(item, shots), guess, length, task.stop)
        for item, guess in zip(items, guesses, strict=True)
    ]
    started = time.perf_counter()
    generations = engine.generate(requests, progress)
    seconds = time.perf_counter() - started
    check_count(len(generations), len(items))
    return _score_generations(task, items, generations, seconds, shots, length)


def answer_scores(
    task: Task,
    items: Sequence[Item],
    engine: TextEngine,
    *,
    shots: Sequence[Item] = (),
    progress: Progress = no_progress,
) -> list[AnswerScore]:
    """Return the teacher-forced NLL of each item's reference answer. Raises ExecutionError if an NLL is not finite."""
    scored = engine.answer_log_probs([(task.prompt(item, shots), task.answer(item)) for item in items], progress)
    check_count(len(scored), len(items))
    for at, score in enumerate(scored):
        if not math.isfinite(score.nll) or score.tokens < 0:
            raise ExecutionError(
                f"item {at}: the engine gave {score.tokens} tokens an NLL of {score.nll}, expected finite values",
                "check the weights for values that are not numbers",
            )
    return scored


def joined(
    task: Task,
    items: Sequence[Item],
    parts: Sequence[EvaluationResult],
    shots: Sequence[Item],
    places: Sequence[int] | None = None,
) -> EvaluationResult:
    """Join the results of parts of the items into the result of all items.

    parts: results of the parts, in order.
    places: of each result of the parts, where its item stands. They are sorted by it. None: the parts are slices.
    """
    if len(parts) == 1:
        return parts[0]
    rows = tuple(row for part in parts for row in part.items)
    check_count(len(rows), len(items))
    if places is not None:
        rows = tuple(rows[at] for at in np.argsort(places))
    whole = replace(parts[0], items=rows)
    nll, tokens, scores = whole.nll, whole.tokens, whole.scores
    is_text = task.is_perplexity
    seconds = sum(part.seconds for part in parts)
    weights = [part.n / len(items) for part in parts]
    return replace(
        whole,
        value=perplexity(nll, tokens) if is_text else float(scores.mean()),
        n=len(items),
        interval95=statistics.perplexity_interval95(nll, tokens) if is_text else statistics.mean_interval95(scores),
        seconds=seconds,
        tokens_per_s=rate(int(tokens.sum()), seconds),
        data_sha256=identity(task, items, shots, 0 if is_text or task.choices is not None else task.max_new_tokens),
        other_metrics={
            name: sum(weight * part.other_metrics[name] for weight, part in zip(weights, parts, strict=True))
            for name in parts[0].other_metrics
        },
    )


def compare(
    task: Task,
    baseline: EvaluationResult,
    value: EvaluationResult,
    resamples: int = statistics.RESAMPLES,
    error: float = statistics.ERROR,
) -> LossEstimate:
    """Return the relative loss of `value` against `baseline`, paired by item.

    task: the task of both.
    error: one-sided error probability of the bounds that decide a verdict.
    Raises OptionError if the two did not run the same task on the same items in the same way, or if the baseline is 0.
    """
    for name in ("task", "metric", "n", "shots", "data_sha256"):
        ours, theirs = getattr(value, name), getattr(baseline, name)
        if ours != theirs:
            raise OptionError(
                f"two evaluations do not compare: `{name}` is {theirs} in the baseline and {ours} in the other",
                "evaluate both on the same items",
            )
    if task.is_perplexity:
        return statistics.perplexity_loss(
            baseline.nll, baseline.tokens, value.nll, value.tokens, resamples, error=error
        )
    return statistics.relative_loss(
        baseline.scores, value.scores, task.higher_is_better, task.score_range, resamples=resamples, error=error
    )


def _score_generations(
    task: Task,
    items: Sequence[Item],
    generations: Sequence[Generation],
    seconds: float,
    shots: Sequence[Item],
    length: int,
) -> EvaluationResult:
    if task.score is None:
        raise AssertionError("a task with an answer has a scorer")
    predictions = [task.cut(generation.text) for generation in generations]
    references = [task.reference(item) for item in items]
    scores = task.score(predictions, references)
    rows = zip(predictions, references, scores[task.metric].tolist(), generations, strict=True)
    return EvaluationResult(
        task=task.name,
        metric=task.metric,
        value=float(scores[task.metric].mean()),
        n=len(items),
        interval95=statistics.mean_interval95(scores[task.metric]),
        seconds=seconds,
        tokens_per_s=rate(sum(generation.tokens for generation in generations), seconds),
        shots=len(shots),
        data_sha256=identity(task, items, shots, length),
        other_metrics={name: float(scores[name].mean()) for name in task.metrics[1:]},
        items=tuple(ItemResult(p, r, score, generation.tokens) for p, r, score, generation in rows),
    )


def _evaluate_text(
    task: Task, items: Sequence[Item], engine: TextEngine, shots: Sequence[Item], progress: Progress
) -> EvaluationResult:
    started = time.perf_counter()
    scored = answer_scores(task, items, engine, shots=shots, progress=progress)
    seconds = time.perf_counter() - started
    nll = np.array([score.nll for score in scored], dtype=np.float64)
    tokens = np.array([score.tokens for score in scored], dtype=np.float64)
    if not tokens.sum():
        raise ExecutionError("the engine scored no tokens in any text", "give texts of more than one token")
    each = item_perplexities(nll, tokens).tolist()
    return EvaluationResult(
        task=task.name,
        metric=task.metric,
        value=perplexity(nll, tokens),
        n=len(items),
        interval95=statistics.perplexity_interval95(nll, tokens),
        seconds=seconds,
        tokens_per_s=rate(int(tokens.sum()), seconds),
        shots=len(shots),
        data_sha256=identity(task, items, shots, 0),
        items=tuple(
            ItemResult("", task.reference(item), ppl, score.tokens, score.nll)
            for item, score, ppl in zip(items, scored, each, strict=True)
        ),
    )
