"""A loss that is stored as JSON and read again."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation.statistics import relative_loss
from moec.evaluation.stored_losses import loss_from_json


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30), st.sampled_from([0.05, 0.0125]))
def test_a_loss_is_read_as_it_was_written(scores: list[float], error: float) -> None:
    """Few items leave bounds that cannot be told, and a standard error that is infinite."""
    baseline = np.maximum(scores, np.arange(len(scores)) == 0)
    found = relative_loss(baseline, scores, resamples=50, error=error)
    assert loss_from_json(json.loads(json.dumps(found.to_json()))) == found


def test_an_infinite_loss_stays_infinite() -> None:
    found = replace(relative_loss([1.0], [1.0], resamples=5), loss=math.inf, value=math.inf)
    again = loss_from_json(json.loads(json.dumps(found.to_json())))
    assert again.loss == again.value == math.inf
