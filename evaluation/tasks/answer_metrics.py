"""Metrics of generated answers: the project's own by name, and any metric of `evaluate`."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.errors import DataError, OptionError

from ..metrics import ROUGE_KINDS, Scores, load, rouge
from .answer_text import AnswerText

EXACT_MATCH, PERPLEXITY = "exact_match", "perplexity"
OWN_METRICS = (EXACT_MATCH, *sorted(ROUGE_KINDS))
"""Metrics of generated answers that need no code from elsewhere."""
_MAX_REASON_CHARACTERS = 200


def answer_metric(
    name: str, text: AnswerText, *, lower_is_better: bool = False, trusts_code: bool = False
) -> dict[str, Any]:
    """Return the fields of `Task` of a metric by its name: `metrics`, `score`, `higher_is_better`, `score_range`.

    name: `exact_match`, a kind of Rouge, or a metric of `evaluate`: a local folder or a name on the hub.
    lower_is_better: the direction of a metric of `evaluate`.
    trusts_code: whether code of other metrics than the project's own may run.
    Raises OptionError for an unknown metric, or for one that runs code without permission.
    """
    check_direction(name, lower_is_better)
    if name not in OWN_METRICS:
        metric = foreign_metric(name, trusts_code)
        names, best = [metric.name], None
    else:
        names = [name] if name == EXACT_MATCH else [name, *(kind for kind in ROUGE_KINDS if kind != name)]
        best = 1.0

    def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Scores]:
        if name == EXACT_MATCH:
            return {name: text.exact_match(predictions, references)}
        compared = list(map(text.prediction, predictions)), list(map(text.reference, references))
        return rouge(*compared) if name in OWN_METRICS else {metric.name: metric.scores(*compared)}

    return {"metrics": tuple(names), "score": score, "higher_is_better": not lower_is_better, "score_range": best}


def check_direction(name: str, lower_is_better: bool) -> None:
    """Raise OptionError if lower values of a metric of the project are to be better."""
    if name in OWN_METRICS and lower_is_better:
        raise OptionError(f"higher values of `{name}` are better", "leave out `--lower-is-better`")


@dataclass(frozen=True, slots=True)
class ForeignMetric:
    """A metric of `evaluate`, computed for one item at a time, so that items can be paired.

    name: the metric's name, without its folder.
    key: name of its value in the result.
    """

    name: str
    key: str
    compute: Callable[..., dict[str, Any]]

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        """Return the value of each item, [n]. Raises DataError for an item without a finite value."""
        values = []
        for at, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
            try:
                value = float(self.compute(predictions=[prediction], references=[reference])[self.key])
            except BaseException as error:  # code of others raises what it likes, SystemExit too
                _pass_interrupt(error)
                raise DataError(
                    f"item {at}: the metric `{self.name}` fails with {_reason(error)}", "take another `--metric`"
                ) from error
            if not math.isfinite(value):
                raise DataError(
                    f"item {at}: the metric `{self.name}` gives {value}, expected a finite value",
                    "take another `--metric`",
                )
            values.append(value)
        return np.array(values, dtype=np.float64)


def foreign_metric(name: str, trusts_code: bool) -> ForeignMetric:
    """Load a metric of `evaluate`, and compute it once.

    name: a folder with `NAME.py`, or a name on the hub. `NAME:KEY` chooses one of several values.
    trusts_code: permission to run the metric's code.
    Raises OptionError without permission, for an unknown metric, or for a metric that takes no pairs of texts.
    Raises MissingDependency without `evaluate`.
    """
    place, _, key = name.partition(":")
    if os.sep in place and not Path(place).exists():
        raise OptionError(f"the metric `{place}` does not exist", "give a folder with the metric's code, or a name")
    if not trusts_code:
        raise OptionError(
            f"`{place}` is none of moec's metrics (exact_match, rouge1, rouge2, rougeL), and a metric of `evaluate` is "
            "code of others, which runs with your rights",
            "correct the name, or read the code and add `--trust-metric-code`",
        )
    metric = _loaded(place)
    short = Path(place).name.removesuffix(".py")
    try:
        values = metric.compute(predictions=["a b"], references=["a b"])
    except BaseException as error:  # code of others raises what it likes, SystemExit too
        _pass_interrupt(error)
        raise OptionError(
            f"the metric `{place}` does not take texts as predictions and references: {_reason(error)}",
            "choose a metric of generated text",
        ) from error
    numbers = [value_name for value_name, value in (values or {}).items() if isinstance(value, (int, float))]
    chosen = key or (short if short in numbers else numbers[0] if len(numbers) == 1 else "")
    if chosen not in numbers:
        raise OptionError(
            f"the metric `{place}` has the values {', '.join(numbers) or 'none'}, and one is needed",
            f"choose one with `--metric {place}:VALUE`",
        )
    return ForeignMetric(short if chosen in (short, "") or len(numbers) == 1 else chosen, chosen, metric.compute)


def _loaded(place: str) -> Any:
    evaluate = load("evaluate", "this metric")
    code_folder, evaluate.config.HF_MODULES_CACHE = evaluate.config.HF_MODULES_CACHE, _code_folder().name
    try:
        return evaluate.load(place, keep_in_memory=True, cache_dir=_code_folder().name)
    except BaseException as error:  # `evaluate` and code of others raise errors of many kinds
        _pass_interrupt(error)
        raise OptionError(
            f"the metric `{place}` cannot be loaded: {_reason(error)}",
            "give a folder with `NAME.py`, or the name of a metric on the hub",
        ) from error
    finally:
        evaluate.config.HF_MODULES_CACHE = code_folder


@cache
def _code_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the copies that `evaluate` makes of a metric's code. They would be in HOME otherwise."""
    return tempfile.TemporaryDirectory(prefix="moec-metric-")


def _pass_interrupt(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        raise error


def _reason(error: BaseException) -> str:
    """Return the text of an error on one line, or its kind. SystemExit has a number alone."""
    if isinstance(error, SystemExit):
        return "SystemExit"
    return " ".join(str(error).split())[:_MAX_REASON_CHARACTERS] or type(error).__name__
