"""The KL of answers of several tasks: the whole mean, and the bound of the task that suffers most."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from moec.compiler.sensitivity.answer_walk import AnswerMeasures
from moec.evaluation.statistics import ONE_SIDED_95, divergence_bound


def measured(kl: np.ndarray) -> AnswerMeasures:
    return AnswerMeasures(kl, np.ones(len(kl), bool), np.zeros(len(kl)))


def test_a_task_with_short_answers_is_not_hidden_by_one_with_long_ones() -> None:
    """Of two tasks each has a mean. The mean over all tokens hardly knows the first one."""
    draw = np.random.default_rng(3)
    counts = [10] * 128 + [100] * 128
    kl = np.concatenate([draw.gamma(2, 0.025, 1280), draw.gamma(2, 0.005, 12800)])
    found = measured(kl).summary(counts, [128, 128])
    assert found.mean == pytest.approx(kl.mean()) and found.mean < 0.02
    (short, short_error), (long, _) = found.by_task
    assert (short, long) == (pytest.approx(kl[:1280].mean()), pytest.approx(kl[1280:].mean()))
    assert divergence_bound(found) == pytest.approx(short + ONE_SIDED_95 * short_error) and short > 0.045
    assert json.loads(json.dumps(found.to_json()))["by_task"] == [list(pair) for pair in found.by_task]


def test_one_task_has_no_further_means() -> None:
    found = measured(np.full(20, 0.01)).summary([10, 10], [2])
    assert found.by_task == () and "by_task" not in found.to_json()
    assert divergence_bound(found) == pytest.approx(0.01)


def test_a_task_with_one_text_counts_with_its_mean() -> None:
    found = measured(np.repeat([0.01, 0.05], [20, 10])).summary([10, 10, 10], [2, 1])
    assert found.by_task[1] == (pytest.approx(0.05), math.inf)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["by_task"][1] == [pytest.approx(0.05), None]
    assert divergence_bound(found) == pytest.approx(0.05)
