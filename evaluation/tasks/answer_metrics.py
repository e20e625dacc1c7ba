"""Metrics of generated answers: the project's own by name, and any metric of `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moec.manifests.errors import OptionError

from ..metrics import ROUGE_KINDS, Scores, rouge
from .answer_text import AnswerText
from .foreign_metrics import foreign_metric

EXACT_MATCH, PERPLEXITY = "exact_match", "perplexity"
OWN_METRICS = (EXACT_MATCH, *sorted(ROUGE_KINDS))
"""Metrics of generated answers that need no code from elsewhere."""


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
