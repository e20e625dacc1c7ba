"""Metrics of generated answers: the project's own by name, and any metric of `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.manifests.errors import OptionError

from ..metrics import ROUGE_KINDS, Scores, rouge
from .answer_text import AnswerText
from .base import Scorer
from .foreign_metrics import foreign_metric

EXACT_MATCH, PERPLEXITY = "exact_match", "perplexity"
OWN_METRICS = (EXACT_MATCH, *sorted(ROUGE_KINDS))
"""Metrics of generated answers that need no code from elsewhere."""


@dataclass(frozen=True, slots=True)
class AnswerMetric:
    """A metric of generated answers. Fields as in `Task`."""

    metrics: tuple[str, ...]
    score: Scorer
    higher_is_better: bool
    score_range: float | None


def answer_metric(
    name: str, text: AnswerText, *, lower_is_better: bool = False, trusts_code: bool = False
) -> AnswerMetric:
    """Return a metric by its name.

    name: `exact_match`, a kind of Rouge, or a metric of `evaluate`: a local folder or a name on the hub.
    lower_is_better: the direction of a metric of `evaluate`.
    trusts_code: whether code of other metrics than the project's own may run.
    Raises OptionError for an unknown metric, or for one that runs code without permission.
    """
    check_direction(name, lower_is_better)
    if name not in OWN_METRICS:
        return _foreign(name, text, lower_is_better, trusts_code)
    if name == EXACT_MATCH:
        return AnswerMetric(
            (name,), lambda predictions, references: {name: text.exact_match(predictions, references)}, True, 1.0
        )

    def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Scores]:
        return rouge(list(map(text.prediction, predictions)), list(map(text.reference, references)))

    others = (kind for kind in ROUGE_KINDS if kind != name)
    return AnswerMetric((name, *others), score, True, 1.0)


def check_direction(name: str, lower_is_better: bool) -> None:
    """Raise OptionError if lower values of a metric of the project are to be better."""
    if name in OWN_METRICS and lower_is_better:
        raise OptionError(f"higher values of `{name}` are better", "leave out `--lower-is-better`")


def _foreign(name: str, text: AnswerText, lower_is_better: bool, trusts_code: bool) -> AnswerMetric:
    metric = foreign_metric(name, trusts_code)

    def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Scores]:
        given = list(map(text.prediction, predictions)), list(map(text.reference, references))
        return {metric.name: metric.scores(*given)}

    return AnswerMetric((metric.name,), score, not lower_is_better, None)
