"""Policies on cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime.expert_cache.eviction import eviction_order
from moec.runtime.expert_cache.policies import edgemoe_score, lfu_score, lrfu_score, lru_score
from moec.runtime.expert_cache.records import HALF_LIFE_TOKENS, ExpertRecords, expert_records, warm_order


def records(layer: list[int], frequency: list[float], num_layers: int) -> ExpertRecords:
    zeros = np.zeros(len(layer), np.int64)
    heat = np.full(len(layer), -np.inf)
    return ExpertRecords(np.array(layer, np.int32), np.array(frequency), zeros, zeros.copy(), heat, num_layers)


@pytest.mark.parametrize(
    ("running", "distances"), [(0, [4, 1, 2, 3]), (1, [3, 4, 1, 2]), (2, [2, 3, 4, 1]), (3, [1, 2, 3, 4])]
)
def test_layer_distance(running: int, distances: list[int]) -> None:
    """The next layer is 1 away, the running one comes again after all others."""
    assert records([0, 1, 2, 3], [0] * 4, 4).layer_distance(running).tolist() == distances


def test_a_model_of_one_layer() -> None:
    assert records([0, 0], [0.5, 0.5], 1).layer_distance(0).tolist() == [1, 1]


def test_edgemoe_by_hand() -> None:
    """f / d with layer 1 running: d = 3, 1, 2 for layers 1, 2, 0."""
    known = records([0, 0, 1, 1, 2, 2], [0.6, 0.4, 0.9, 0.1, 0.3, 0.05], 3)
    expected = [0.6 / 2, 0.4 / 2, 0.9 / 3, 0.1 / 3, 0.3 / 1, 0.05 / 1]
    assert edgemoe_score(known, 1) == pytest.approx(expected)
    order = eviction_order(known, edgemoe_score, 1, np.arange(6)).tolist()
    assert order[:3] == [3, 5, 1] and set(order[3:]) == {0, 2, 4}
    # One layer on, the experts of layer 2 are the farthest away: d = 1, 2, 3 for layers 0, 1, 2.
    assert eviction_order(known, edgemoe_score, 2, np.arange(6)).tolist() == [5, 3, 4, 1, 2, 0]


def test_ties_fall_to_the_least_recently_used_then_to_the_lowest_index() -> None:
    known = records([0, 0, 0, 0], [0.25] * 4, 1)
    known.last_used[:] = [5, 3, 3, 9]
    assert eviction_order(known, edgemoe_score, 0, np.array([3, 2, 1, 0])).tolist() == [1, 2, 0, 3]


def test_lru_and_lfu() -> None:
    known = records([0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4], 2)
    known.last_used[:] = [4, 0, 7, 2]
    known.uses[:] = [1, 9, 5, 5]
    assert eviction_order(known, lru_score, 0, np.arange(4)).tolist() == [1, 3, 0, 2]
    assert eviction_order(known, lfu_score, 0, np.arange(4)).tolist() == [0, 3, 2, 1]
    assert eviction_order(known, lru_score, 0, np.array([2, 0])).tolist() == [0, 2]
    assert eviction_order(known, lru_score, 0, np.array([], np.int64)).tolist() == []


def test_lrfu_by_hand() -> None:
    """One layer: the clock counts tokens, and a use counts half after HALF_LIFE_TOKENS of them."""
    known = records([0, 0, 0], [0.0] * 3, 1)
    for clock, used in ((1, [0]), (2, [0]), (HALF_LIFE_TOKENS + 2, [1]), (3 * HALF_LIFE_TOKENS + 2, [1])):
        known.use(used, clock)
    then = 2.0 ** (known.heat - known.last_used / known.half_life)
    assert then == pytest.approx([1 + 2 ** (-1 / HALF_LIFE_TOKENS), 1 + 1 / 4, 0])
    assert known.uses.tolist() == [2, 2, 0] and known.last_used.tolist() == [2, 3 * HALF_LIFE_TOKENS + 2, 0]
    # Today the two uses of expert 0 are worth 2 / 8, those of expert 1 5 / 4.
    now = 2.0 ** (lrfu_score(known, 0) - known.last_used.max() / known.half_life)
    assert now == pytest.approx([then[0] / 8, 5 / 4, 0], rel=1e-6)
    assert eviction_order(known, lrfu_score, 0, np.arange(3)).tolist() == [2, 0, 1]
    fresh = known.unused()
    assert fresh.uses.tolist() == [0, 0, 0] and known.uses.tolist() == [2, 2, 0]


def test_lrfu_starts_with_what_calibration_saw() -> None:
    known = expert_records(np.array([0, 0, 1, 1]), np.array([3.0, 1.0, 5.0, 5.0]), 2)
    assert (2.0**known.heat).tolist() == pytest.approx([HALF_LIFE_TOKENS * share for share in (0.75, 0.25, 0.5, 0.5)])


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), levels=st.integers(1, 5))
def test_the_first_of_an_order_are_those_of_the_whole_one(seed: int, count: int, levels: int) -> None:
    """This holds if many scores are equal, or none is known."""
    random = np.random.default_rng(seed)
    known = records(random.integers(0, 2, 20).tolist(), random.integers(0, levels, 20).tolist(), 2)
    known.last_used[:] = random.integers(0, 3, 20)
    candidates = random.permutation(20)[:12]
    for score in (edgemoe_score, lrfu_score, lru_score):
        whole = eviction_order(known, score, 1, candidates)
        assert eviction_order(known, score, 1, candidates, count).tolist() == whole[:count].tolist()


def test_frequencies_are_shares_of_a_layer() -> None:
    known = expert_records(np.array([0, 0, 1, 1, 2, 2]), np.array([3.0, 1.0, 0.0, 10.0, 0.0, 0.0]), 3)
    assert known.frequency.tolist() == [0.75, 0.25, 0, 1, 0, 0]
    assert warm_order(known).tolist() == [3, 0, 1, 2, 4, 5]
    assert known.last_used.tolist() == known.uses.tolist() == [0] * 6
