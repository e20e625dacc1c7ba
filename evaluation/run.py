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
from .engine import AnswerScore, GenerationRequest, TextEngine, check_count, in_order, no_progress
from .metrics import item_perplexities, perplexity
from .results import EvaluationResult, ItemResult, identity, rate
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
        return _evaluate_choices(task, items, engine, shots, progress)
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
    generations = in_order(engine.generate, requests, progress)
    seconds = time.perf_counter() - started
    predictions = [task.cut(generation.text) for generation in generations]
    references = [task.reference(item) for item in items]
    if task.score is None:
        raise AssertionError("a task with an answer has a scorer")
    answers = [
        task.without_thought(request.prompt, prediction)
        for request, prediction in zip(requests, predictions, strict=True)
    ]
    scores = task.score(answers, references)
    results = zip(predictions, references, scores[task.metric].tolist(), generations, strict=True)
    rows = [
        ItemResult(prediction, reference, score, new.tokens, is_cut=new.is_cut)
        for prediction, reference, score, new in results
    ]
    others = {name: float(scores[name].mean()) for name in task.metrics[1:]}
    return _result(task, items, shots, length, seconds, rows, others)


def answer_scores(
    task: Task,
    items: Sequence[Item],
    engine: TextEngine,
    *,
    shots: Sequence[Item] = (),
    progress: Progress = no_progress,
) -> list[AnswerScore]:
    """Return the teacher-forced NLL of each item's reference answer. Raises ExecutionError if an NLL is not finite."""
    pairs = [(task.prompt(item, shots), task.answer(item)) for item in items]
    scored = in_order(engine.answer_log_probs, pairs, progress)
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
    rows = tuple(row for result in parts for row in result.items)
    check_count(len(rows), len(items))
    if places is not None:
        rows = tuple(rows[at] for at in np.argsort(places))
    weights = [result.n / len(items) for result in parts]
    others = {
        name: sum(weight * result.other_metrics[name] for weight, result in zip(weights, parts, strict=True))
        for name in parts[0].other_metrics
    }
    length = 0 if task.is_perplexity or task.choices is not None else task.max_new_tokens
    return _result(task, items, shots, length, sum(result.seconds for result in parts), rows, others)


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


def _result(
    task: Task,
    items: Sequence[Item],
    shots: Sequence[Item],
    length: int,
    seconds: float,
    rows: Sequence[ItemResult],
    others: dict[str, float],
) -> EvaluationResult:
    """Return the result of the primary metric from the results of the items.

    length: most new tokens, or 0.
    others: values of the other metrics.
    """
    result = EvaluationResult(
        task=task.name,
        metric=task.metric,
        value=math.nan,
        n=len(items),
        interval95=(math.nan, math.nan),
        seconds=seconds,
        tokens_per_s=rate(sum(row.tokens for row in rows), seconds),
        shots=len(shots),
        data_sha256=identity(task, items, shots, length),
        other_metrics=others,
        items=tuple(rows),
        max_new_tokens=length,
        cut=sum(row.is_cut for row in rows),
    )
    if task.is_perplexity:
        value, interval = perplexity, statistics.perplexity_interval95
        return replace(result, value=value(result.nll, result.tokens), interval95=interval(result.nll, result.tokens))
    return replace(result, value=float(result.scores.mean()), interval95=statistics.mean_interval95(result.scores))


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
    perplexities = item_perplexities(nll, tokens).tolist()
    rows = [
        ItemResult("", task.reference(item), value, score.tokens, score.nll)
        for item, score, value in zip(items, scored, perplexities, strict=True)
    ]
    return _result(task, items, shots, 0, seconds, rows, {})


def _evaluate_choices(
    task: Task, items: Sequence[Item], engine: TextEngine, shots: Sequence[Item], progress: Progress
) -> EvaluationResult:
    """Return accuracy by log-likelihood, and by log-likelihood per character of the answer. Ties: the first answer.

    Every given answer is scored, and the likeliest one is the prediction.
    Raises ExecutionError if the engine breaks its contract.
    """
    listed = [task.given_answers(item, shots) for item in items]
    pairs = [pair for choices, _ in listed for pair in choices]
    started = time.perf_counter()
    scored = in_order(engine.answer_log_probs, pairs, progress)
    seconds = time.perf_counter() - started
    rows, scores, at = [], dict[str, list[float]]((name, []) for name in task.metrics), 0
    for place, (item, (choices, right)) in enumerate(zip(items, listed, strict=True)):
        scores_of_item = scored[at : at + len(choices)]
        at += len(choices)
        if not all(math.isfinite(score.nll) for score in scores_of_item):
            raise ExecutionError(
                f"item {place}: the engine gave an answer an NLL that is not finite",
                "check the weights for values that are not numbers",
            )
        nll = np.array([score.nll for score in scores_of_item])
        lengths = np.array([len(answer.strip()) for _, answer in choices])
        chosen = {"accuracy": int(nll.argmin()), "accuracy_by_length": int((nll / lengths).argmin())}
        for name in task.metrics:
            scores[name].append(float(chosen[name] == right))
        tokens = sum(score.tokens for score in scores_of_item)
        prediction = choices[chosen[task.metric]][1].strip()
        rows.append(ItemResult(prediction, task.reference(item), scores[task.metric][-1], tokens))
    return _result(
        task, items, shots, 0, seconds, rows, {name: float(np.mean(scores[name])) for name in task.metrics[1:]}
    )
