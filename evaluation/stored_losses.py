"""Losses that were stored as JSON, read again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .statistics import LossEstimate


def loss_from_json(values: Mapping[str, Any]) -> LossEstimate:
    """Invert LossEstimate.to_json. A missing bound is infinite on its side, and a missing standard error infinite."""
    low, high = values["interval95"]
    finite = {
        "interval95": (_told(low, -math.inf), _told(high, math.inf)),
        "lower95": _told(values["lower95"], -math.inf),
        "upper95": _told(values["upper95"], math.inf),
        "standard_error": _told(values["standard_error"], math.inf),
    }
    return LossEstimate(**{**values, **finite})


def _told(value: float | None, otherwise: float) -> float:
    """Return a number that JSON stores as null if it is not finite."""
    return otherwise if value is None else value
