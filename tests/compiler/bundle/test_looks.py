"""Looks of a certificate: the items of each, and an error of the whole that is as stated."""

from __future__ import annotations

import numpy as np
import pytest

from moec.compiler.bundle.looks import look_errors, look_positions
from moec.evaluation.data import ItemSet
from moec.evaluation.tasks import find_task


@pytest.mark.parametrize(
    ("items", "looks"), [(40, [40]), (480, [360, 480]), (1319, [330, 660, 989, 1319]), (4000, [1000, 2000, 3000, 4000])]
)
def test_looks_end_at_the_last_item(items: int, looks: list[int]) -> None:
    lines = ItemSet(find_task("perplexity"), "made", tuple({"text": f"{at}"} for at in range(items)))
    positions = look_positions(lines, True)
    assert np.cumsum([len(added) for added in positions]).tolist() == looks
    assert sorted(at for added in positions for at in added) == list(range(items))
    assert look_positions(lines, False) == [list(range(items))]


@pytest.mark.parametrize("counts", [[4000], [1000, 2000, 3000, 4000], [250, 1000], [330, 660, 989, 1319]])
@pytest.mark.parametrize("error", [0.05, 0.035])
def test_all_looks_together_err_as_one(counts: list[int], error: float) -> None:
    """Simulated with the sums of normal items. The last look keeps most of the error."""
    draws, nominal = np.random.default_rng(0), look_errors(counts, error)
    steps = np.sqrt(np.diff(counts, prepend=0))[:, None] * draws.standard_normal((len(counts), 200_000))
    values = np.cumsum(steps, axis=0) / np.sqrt(counts)[:, None]
    bounds = np.quantile(draws.standard_normal(4_000_000), 1 - np.array(nominal))
    assert (values > bounds[:, None]).any(0).mean() == pytest.approx(error, rel=0.05)
    assert error * 0.8 < nominal[-1] <= error and nominal == sorted(nominal)


def test_an_early_look_spends_what_it_may() -> None:
    assert look_errors([1000, 2000, 3000, 4000], 0.05)[0] == pytest.approx(0.05 / 64, rel=0.01)
    assert look_errors([7], 0.01) == [0.01]
