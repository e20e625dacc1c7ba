"""Evaluate an engine on items, and compare two evaluations item by item."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moec.manifests.errors import ExecutionError, OptionError

from . import statistics
from .data import items_sha256
from .engine import AnswerScore, Generation, GenerationRequest, Progress, TextEngine, no_progress
from .metrics import item_perplexities, perplexity
from .statistics import Array, LossEstimate
from .tasks import Item, Task, find_task


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One item: `tokens` new tokens of the prediction, or tokens scored; `nll` in nats where the task is scored so."""

    prediction: str
    reference: str
    score: float
    tokens: int
    nll: float | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """The primary metric of one engine on one set of items, with what a paired comparison needs.

    seconds: time inside the engine; tokens_per_s: new (or scored) tokens per such second. data_sha256 names items,
    shots and length limit: two results compare only if it is equal.
    """

    task: str
    metric: str
    value: float
    n: int
    interval95: tuple[float, float]
    seconds: float
    tokens_per_s: float
    shots: int
    data_sha256: str
    other_metrics: dict[str, float] = field(default_factory=dict)
    items: tuple[ItemResult, ...] = ()

    @property
    def scores(self) -> Array:
        """Primary score of each item, [n]."""
        return np.array([item.score for item in self.items], dtype=np.float64)

    @property
    def nll(self) -> Array:
        """Summed NLL of each item in nats, [n]; nan where the task is not scored so."""
        return np.array([math.nan if item.nll is None else item.nll for item in self.items], dtype=np.float64)

    @property
    def tokens(self) -> Array:
        """Tokens of each item, [n]."""
        return np.array([item.tokens for item in self.items], dtype=np.float64)

    def to_json(self, per_item: bool = False, timing: bool = True) -> dict[str, object]:
        """Plain values for JSON; what is not finite becomes None. Without `timing` equal runs give equal values."""
        values: dict[str, object] = {
            "task": self.task,
            "metric": self.metric,
            "value": _finite(self.value),
            "n": self.n,
            "interval95": [_finite(bound) for bound in self.interval95],
        }
        if timing:
            values |= {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s}
        values |= {"shots": self.shots, "data_sha256": self.data_sha256}
        values["other_metrics"] = {name: _finite(value) for name, value in self.other_metrics.items()}
        if per_item:
            values["items"] = [_item_json(item) for item in self.items]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EvaluationResult:
        """Rebuild what `to_json(per_item=True)` gave, for a journal. Raises KeyError or TypeError on anything else."""
        low, high = values["interval95"]
        items = (ItemResult(**{**item, "score": _number(item["score"])}) for item in values["items"])
        others = {name: _number(value) for name, value in values["other_metrics"].items()}
        rebuilt = {"value": _number(values["value"]), "interval95": (_number(low), _number(high))}
        return cls(**{**values, **rebuilt, "other_metrics": others, "items": tuple(items)})


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

    shots: solved examples put before each item. max_new_tokens: the task's own where None. drafts: guesses of the
    continuations, by default the reference answers; an engine that knows how verifies a draft in one pass and decodes
    on from where greedy decoding departs from it, so the result is the same and comes sooner. Hand in `[None] * n` to
    measure decoding without it.
    Raises OptionError on unusable arguments, ExecutionError if the engine breaks its contract.
    """
    if not items:
        raise OptionError("there are no items to evaluate", "hand in at least one")
    length = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    if task.answer_field is None:
        return _evaluate_text(task, items, engine, shots, progress)
    if length < 1:
        raise OptionError(f"max_new_tokens must be at least 1, found {length}", "leave it out for the task's own")
    guesses = [task.answer(item) for item in items] if drafts is None else list(drafts)
    if len(guesses) != len(items):
        raise OptionError(f"there are {len(guesses)} drafts for {len(items)} items", "hand in one draft per item")
    requests = [
        GenerationRequest(task.prompt(item, shots), guess, length, task.stop)
        for item, guess in zip(items, guesses, strict=True)
    ]
    started = time.perf_counter()
    generations = engine.generate(requests, progress)
    seconds = time.perf_counter() - started
    _check_count(len(generations), len(items))
    return _score_generations(task, items, generations, seconds, shots, length)


def answer_scores(
    task: Task,
    items: Sequence[Item],
    engine: TextEngine,
    *,
    shots: Sequence[Item] = (),
    progress: Progress = no_progress,
) -> list[AnswerScore]:
    """Teacher-forced NLL of the reference answer of each item. Raises ExecutionError if the engine's is not finite."""
    scored = engine.answer_log_probs([(task.prompt(item, shots), task.answer(item)) for item in items], progress)
    _check_count(len(scored), len(items))
    for at, score in enumerate(scored):
        if not math.isfinite(score.nll) or score.tokens < 0:
            raise ExecutionError(
                f"item {at}: the engine gave {score.tokens} tokens an NLL of {score.nll}, expected finite values",
                "check the weights for values that are not numbers",
            )
    return scored


def compare(baseline: EvaluationResult, value: EvaluationResult, resamples: int = statistics.RESAMPLES) -> LossEstimate:
    """The relative loss of `value` against `baseline`, paired by item.

    Raises OptionError if the two did not run the same task on the same items in the same way, or if the baseline is 0.
    """
    for name in ("task", "metric", "n", "shots", "data_sha256"):
        ours, theirs = getattr(value, name), getattr(baseline, name)
        if ours != theirs:
            raise OptionError(
                f"two evaluations do not compare: `{name}` is {theirs} in the baseline and {ours} in the other",
                "evaluate both on the same items",
            )
    task = find_task(value.task)
    if task.answer_field is None:
        return statistics.perplexity_loss(baseline.nll, baseline.tokens, value.nll, value.tokens, resamples)
    return statistics.relative_loss(
        baseline.scores, value.scores, task.higher_is_better, task.score_range, resamples=resamples
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
        tokens_per_s=_rate(sum(generation.tokens for generation in generations), seconds),
        shots=len(shots),
        data_sha256=_identity(task, items, shots, length),
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
        raise ExecutionError("the engine scored no tokens in any text", "hand in texts of more than one token")
    each = item_perplexities(nll, tokens).tolist()
    return EvaluationResult(
        task=task.name,
        metric=task.metric,
        value=perplexity(nll, tokens),
        n=len(items),
        interval95=statistics.perplexity_interval95(nll, tokens),
        seconds=seconds,
        tokens_per_s=_rate(int(tokens.sum()), seconds),
        shots=0,
        data_sha256=_identity(task, items, (), 0),
        items=tuple(
            ItemResult("", task.reference(item), ppl, score.tokens, score.nll)
            for item, score, ppl in zip(items, scored, each, strict=True)
        ),
    )


def _identity(task: Task, items: Sequence[Item], shots: Sequence[Item], length: int) -> str:
    return items_sha256(task, [*shots, {**dict.fromkeys(task.fields, f"shots before, {length} tokens")}, *items])


def _check_count(found: int, expected: int) -> None:
    if found != expected:
        raise ExecutionError(f"the engine gave {found} results for {expected} items")


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _item_json(item: ItemResult) -> dict[str, object]:
    values: dict[str, object] = {
        "prediction": item.prediction,
        "reference": item.reference,
        "score": _finite(item.score),
        "tokens": item.tokens,
    }
    return values if item.nll is None else {**values, "nll": item.nll}
