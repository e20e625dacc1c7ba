"""The replay makes the decisions of the real cache, and nothing beats the offline optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import MemoryBudgetExceeded
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.policies import SCORES, MultidimensionalScore
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.expert_cache.records import expert_records, warm_order
from moec.runtime.options.runtime import MAX_THREADS, EvictionWeights
from moec.runtime.simulation.fitting import replayed_bytes
from moec.runtime.simulation.replay import OPTIMUM, POPULARITY, replay
from moec.runtime.trace.trace import Access
from tests.runtime.faulty_source import FaultySource

LAYERS, EXPERTS, TOP_K = 3, 6, 2
COUNT = LAYERS * EXPERTS
FIRST = [layer * EXPERTS for layer in range(LAYERS)]
POLICIES = (*SCORES, POPULARITY)
LAYER = np.repeat(np.arange(LAYERS), EXPERTS)


@st.composite
def traces(draw: st.DrawFn, widest: int = TOP_K) -> list[Access]:
    """Passes over all layers, each asking for 1 to `widest` experts."""
    chosen = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=widest, unique=True).map(sorted)
    passes = draw(st.lists(st.tuples(*[chosen] * LAYERS), min_size=1, max_size=15))
    return [(layer, tuple(FIRST[layer] + e for e in some)) for one in passes for layer, some in enumerate(one)]


popularities = st.lists(st.integers(0, 20), min_size=COUNT, max_size=COUNT).map(lambda n: np.array(n, np.float64))


@given(trace=traces(), popularity=popularities, slots=st.integers(TOP_K, COUNT), warm=st.booleans())
def test_no_policy_misses_less_than_the_optimum(
    trace: list[Access], popularity: np.ndarray, slots: int, warm: bool
) -> None:
    sizes, records = np.full(COUNT, 10, np.int64), expert_records(LAYER, popularity, LAYERS)
    start = warm_order(records).tolist() if warm else []
    spec = CacheSpec(sizes, slots * 10, records)
    best = replay(trace, spec, OPTIMUM, start)
    for policy in POLICIES:
        counts = replay(trace, spec, policy, start)
        assert best.misses <= counts.misses
        assert counts.lookups == best.lookups == sum(len(experts) for _, experts in trace)
        assert counts.bytes_read == 10 * counts.misses


@given(trace=traces(), slots=st.integers(TOP_K, COUNT - 1))
def test_more_room_never_costs_the_optimum_a_miss(trace: list[Access], slots: int) -> None:
    """For other policies this does not hold: LFU and similar ones may keep the wrong experts in the larger cache."""
    sizes, records = np.full(COUNT, 10, np.int64), expert_records(LAYER, np.zeros(COUNT), LAYERS)
    less, more = (replay(trace, CacheSpec(sizes, room * 10, records), OPTIMUM).misses for room in (slots, slots + 1))
    assert more <= less


@given(
    trace=traces(widest=EXPERTS),
    popularity=popularities,
    sizes=st.lists(st.integers(1, 9), min_size=COUNT, max_size=COUNT).map(lambda n: np.array(n, np.int64)),
    room=st.integers(0, 60),
    policy=st.sampled_from(sorted(SCORES)),
)
def test_counts_are_those_of_the_real_cache(
    trace: list[Access], popularity: np.ndarray, sizes: np.ndarray, room: int, policy: str
) -> None:
    capacity = TOP_K * int(sizes.max()) + room
    records = expert_records(LAYER, popularity, LAYERS)
    warm = warm_order(records).tolist()
    simulated = replay(trace, CacheSpec(sizes, capacity, records), policy, warm)
    assert not records.uses.any(), "the replay touched its input"

    score = SCORES[policy]  # type: ignore[index]
    own = CacheSpec(sizes, capacity, expert_records(LAYER, popularity, LAYERS))
    cache = PythonCache(FaultySource(sizes, capacity), own, score)
    cache.warm(warm)
    cache.finish_warming()
    before = cache.stats.copy()
    for layer, experts in trace:
        assert sorted(index for some in cache.stream(layer, experts) for index in some) == sorted(experts)
        cache.check_invariants()
    cache.close()
    real = cache.stats.since(before)
    assert simulated.misses == real.misses and simulated.hits == real.hits and simulated.lookups == real.lookups
    assert simulated.evictions == real.evictions and simulated.rereads == real.rereads
    assert simulated.bytes_read == real.bytes_read


def test_the_optimum_keeps_what_is_needed_first() -> None:
    trace: list[Access] = [(0, (0,)), (0, (1,)), (0, (2,)), (0, (0,)), (0, (1,)), (0, (2,))]
    records = expert_records(np.zeros(3, np.int64), np.zeros(3), 1)
    spec = CacheSpec(np.ones(3, np.int64), 2, records)
    assert replay(trace, spec, "lru").misses == 6
    assert replay(trace, spec, OPTIMUM).misses == 4


def test_static_popularity_keeps_the_popular() -> None:
    records = expert_records(np.zeros(3, np.int64), np.array([5.0, 1.0, 3.0]), 1)
    trace: list[Access] = [(0, (index,)) for index in (0, 1, 2, 0, 1, 0)]
    assert replay(trace, CacheSpec(np.ones(3, np.int64), 2, records), POPULARITY, warm=[0]).misses == 3


def test_an_expert_that_cannot_fit_is_refused() -> None:
    records = expert_records(np.zeros(1, np.int64), np.zeros(1), 1)
    with pytest.raises(MemoryBudgetExceeded):
        replay([(0, (0,))], CacheSpec(np.array([10]), 5, records), "lru")


def test_options_and_kernels_agree_on_the_most_threads() -> None:
    from moec.runtime import kernels

    assert kernels.MAX_THREADS == MAX_THREADS


@given(
    trace=traces(widest=EXPERTS),
    popularity=popularities,
    sizes=st.lists(st.sampled_from([0, 10, 10, 20, 30]), min_size=COUNT, max_size=COUNT),
    room=st.integers(30, 300),
    encoder=st.integers(0, 1),
    weights=st.sampled_from([(1, 0, 0, 0), (0, 1, 0, 0), (0.0625, 0.75, 0, 0.1875), (0.25, 0.25, 0.25, 0.25)]),
)
def test_bytes_are_counted_as_in_a_replay(
    trace: list[Access], popularity: np.ndarray, sizes: list[int], room: int, encoder: int, weights: tuple[float, ...]
) -> None:
    """Also if experts have unequal sizes or are left out, and if a layer needs more than the cache holds."""
    records = expert_records(LAYER, popularity, LAYERS, encoder)
    spec, score = CacheSpec(np.array(sizes, np.int64), room, records), MultidimensionalScore(EvictionWeights(*weights))
    warm = warm_order(records).tolist()
    assert replayed_bytes(trace, spec, score, warm) == replay(trace, spec, score, warm).bytes_read


def test_experts_of_many_bytes_and_one_that_does_not_fit_are_counted_as_in_a_replay() -> None:
    """Reads of large experts wait for others. The cache then decides more often."""
    records = expert_records(LAYER, np.ones(COUNT), LAYERS)
    score, size = MultidimensionalScore(EvictionWeights(0.25, 0.5, 0, 0.25)), 1 << 30
    trace: list[Access] = [(layer, tuple(range(FIRST[layer], FIRST[layer] + 5))) for layer in [0, 1, 2] * 3]
    spec = CacheSpec(np.full(COUNT, size, np.int64), 6 * size, records)
    assert replayed_bytes(trace, spec, score, []) == replay(trace, spec, score).bytes_read > 0
    small = CacheSpec(np.full(COUNT, 10, np.int64), 5, records)
    with pytest.raises(MemoryBudgetExceeded, match="an expert of 10 bytes does not fit"):
        replayed_bytes(trace, small, score, [])
