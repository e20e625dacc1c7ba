"""The metrics as local `evaluate.Metric` objects. `evaluate` is loaded only on request, because it takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from moec.manifests.errors import OptionError

from .metrics import ROUGE_KINDS, perplexity, rouge
from .optional import load
from .tasks.answer_text import NUMBER, AnswerText


def load_metric(name: str) -> Any:
    """Return an `evaluate.Metric`: `exact_match`, `rouge` or `perplexity`. It stays in memory and uses no network.

    `exact_match` and `rouge` take predictions and references, both text.
    `perplexity` takes the summed NLL in nats as predictions and the token counts as references.
    `compute` returns means (0 to 1), or the perplexity.
    Raises OptionError for another name, MissingDependency without `evaluate`.
    """
    if name not in _METRICS:
        raise OptionError(f"metric `{name}` is not known", f"choose one of {', '.join(_METRICS)}")
    kind, compute, description = _METRICS[name]
    return _metric_class(name, kind, compute, description)(keep_in_memory=True)


def _exact_match(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    return {"exact_match": float(np.mean(AnswerText(compare=NUMBER).exact_match(predictions, references)))}


def _rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    scores = rouge(predictions, references)
    return {kind: float(np.mean(scores[kind])) for kind in ROUGE_KINDS}


def _perplexity(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    return {"perplexity": perplexity(np.asarray(predictions, np.float64), np.asarray(references, np.float64))}


_Compute = Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]
_METRICS: dict[str, tuple[str, _Compute, str]] = {
    "exact_match": ("string", _exact_match, "Share of solutions whose final number is right (GSM8K's form)."),
    "rouge": ("string", _rouge, "Rouge F1 with stemmer, mean over items."),
    "perplexity": ("float64", _perplexity, "exp(sum of NLL / sum of tokens)."),
}


def _metric_class(name: str, kind: str, compute: _Compute, description: str) -> Any:
    evaluate, datasets = load("evaluate", "this metric"), load("datasets", "this metric")
    features = datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)})
    information = partial(evaluate.MetricInfo, description=description, citation="", inputs_description="")
    return type(
        f"Moec{name.title().replace('_', '')}",
        (evaluate.Metric,),
        {
            "_info": lambda self: information(features=features),
            "_compute": lambda self, predictions, references: compute(predictions, references),
        },
    )
