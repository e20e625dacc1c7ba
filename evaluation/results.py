"""Results of an evaluation, item by item, and their plain form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .data import items_sha256
from .statistics import Array
from .tasks import Item, Task


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Result of one item.

    tokens: new tokens of the prediction, or scored tokens.
    nll: in nats, for tasks that are scored by NLL; else None.
    is_cut: a limit of tokens ended the prediction.
    """

    prediction: str
    reference: str
    score: float
    tokens: int
    nll: float | None = None
    is_cut: bool = False


@dataclass(frozen=True)
class EvaluationResult:
    """The primary metric of one engine on one set of items, with the data of a paired comparison.

    seconds: time inside the engine.
    tokens_per_s: new or scored tokens per second of that time.
    data_sha256: digest of items, shots and length limit. Two results are comparable only if it is equal.
    max_new_tokens: limit of a generated answer; 0 for tasks without one.
    cut: number of answers that a limit of tokens ended.
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
    max_new_tokens: int = 0
    cut: int = 0

    @property
    def scores(self) -> Array:
        """Primary score of each item, [n]."""
        return np.array([item.score for item in self.items], dtype=np.float64)

    @property
    def nll(self) -> Array:
        """Summed NLL of each item in nats, [n]; nan for tasks that are not scored by NLL."""
        return np.array([math.nan if item.nll is None else item.nll for item in self.items], dtype=np.float64)

    @property
    def tokens(self) -> Array:
        """Tokens of each item, [n]."""
        return np.array([item.tokens for item in self.items], dtype=np.float64)

    def to_json(self, per_item: bool = False, timing: bool = True) -> dict[str, object]:
        """Return plain values for JSON.

        Values that are not finite become None. Without `timing` equal runs give equal values.
        """
        values: dict[str, object] = {
            "task": self.task,
            "metric": self.metric,
            "value": finite(self.value),
            "n": self.n,
            "interval95": [finite(bound) for bound in self.interval95],
        }
        if timing:
            values |= {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s}
        values |= {"shots": self.shots, "data_sha256": self.data_sha256}
        values |= {"max_new_tokens": self.max_new_tokens, "cut": self.cut}
        values["other_metrics"] = {name: finite(value) for name, value in self.other_metrics.items()}
        if per_item:
            values["items"] = [
                {"prediction": item.prediction, "reference": item.reference, "score": finite(item.score)}
                | {"tokens": item.tokens}
                | ({"is_cut": item.is_cut} if self.max_new_tokens else {})
                | ({} if item.nll is None else {"nll": item.nll})
                for item in self.items
            ]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EvaluationResult:
        """Rebuild a result from `to_json(per_item=True)`, for a journal.

        Raises KeyError or TypeError for other values.
        """
        low, high = values["interval95"]
        items = (ItemResult(**{**item, "score": _number(item["score"])}) for item in values["items"])
        others = {name: _number(value) for name, value in values["other_metrics"].items()}
        rebuilt = {"value": _number(values["value"]), "interval95": (_number(low), _number(high))}
        return cls(**{**values, **rebuilt, "other_metrics": others, "items": tuple(items)})


def identity(task: Task, items: Sequence[Item], shots: Sequence[Item], length: int) -> str:
    """Return a digest of the evaluated data: items, solved examples, most new tokens."""
    return items_sha256(task, [*shots, {**dict.fromkeys(task.fields, f"shots before, {length} tokens")}, *items])


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
