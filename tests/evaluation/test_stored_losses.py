"""A loss that is stored as JSON and read again."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation.statistics import distribution_summary, loss_from_json, relative_loss, summary_from_json


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


def test_a_kl_is_read_as_it_was_written() -> None:
    """Also that of several tasks, one of which has a single text."""
    whole = replace(distribution_summary([0.1, 0.3], [True, False], [0, 1]), by_task=((0.1, math.inf), (0.3, 0.2)))
    for found in (whole, replace(whole, by_task=(), standard_error=math.inf)):
        assert summary_from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
