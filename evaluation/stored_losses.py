"""Losses and KLs that were stored as JSON, read again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .statistics import DistributionSummary, LossEstimate


def loss_from_json(values: Mapping[str, Any]) -> LossEstimate:
    """Invert LossEstimate.to_json. A missing number is infinite, a missing bound on its side."""
    finite: dict[str, Any] = {
        "value": _told(values["value"], math.inf),
        "loss": _told(values["loss"], math.inf),
        "interval95": _interval(values["interval95"]),
        "lower95": _told(values["lower95"], -math.inf),
        "upper95": _told(values["upper95"], math.inf),
        "standard_error": _told(values["standard_error"], math.inf),
    }
    if values.get("bounds") is not None:
        finite["bounds"] = _interval(values["bounds"])
    return LossEstimate(**{**values, **finite})


def summary_from_json(values: Mapping[str, Any]) -> DistributionSummary:
    """Invert DistributionSummary.to_json. A missing standard error is infinite."""
    error = _told(values["standard_error"], math.inf)
    by_task = tuple((mean, _told(each, math.inf)) for mean, each in values.get("by_task", ()))
    return DistributionSummary(**{**values, "standard_error": error, "by_task": by_task})


def _interval(values: Sequence[float | None]) -> tuple[float, float]:
    low, high = values
    return _told(low, -math.inf), _told(high, math.inf)


def _told(value: float | None, otherwise: float) -> float:
    """Return a number that JSON stores as null if it is not finite."""
    return otherwise if value is None else value
