"""Passes that need more experts than the cache holds keep a part of them for the next pass."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.eviction import eviction_order
from moec.runtime.expert_cache.instant_cache import InstantCache
from moec.runtime.expert_cache.policies import lrfu_score
from moec.runtime.expert_cache.records import expert_records
from moec.runtime.expert_cache.residency import Residency
from moec.runtime.storage.read_runs import MAX_RUN_BYTES, NONE, RUNS_ON_THE_WAY, ReadRuns

LAYERS, EXPERTS = 4, 8
COUNT = LAYERS * EXPERTS
LAYER = np.arange(COUNT) // EXPERTS
SIZES = np.full(COUNT, MAX_RUN_BYTES)


def spec_of(capacity: int, pinned: int = 0) -> CacheSpec:
    """Return a cache for some of the experts. All of them were equally popular."""
    records = expert_records(LAYER, np.ones(COUNT), LAYERS)
    return CacheSpec(SIZES, capacity * MAX_RUN_BYTES, records, pinned * MAX_RUN_BYTES)


def ledger_of(capacity: int, pinned: int = 0) -> Residency:
    spec = spec_of(capacity, pinned)
    order = partial(eviction_order, spec.records, lrfu_score)
    return Residency(spec, order, runs=ReadRuns(SIZES.tolist(), [NONE] * COUNT))


def experts_of(layer: int, count: int = EXPERTS) -> list[int]:
    return list(range(layer * EXPERTS, layer * EXPERTS + count))


@pytest.mark.parametrize("capacity", [12, 16, 24, 31])
def test_a_pass_over_all_experts_reads_what_the_cache_cannot_hold(capacity: int) -> None:
    """No cache misses less than COUNT - capacity. The reads under way take a few places more."""
    cache = InstantCache(spec_of(capacity), lrfu_score)
    for number in range(12):
        before = cache.stats.misses
        for layer in range(LAYERS):
            cache.serve(layer, experts_of(layer), all_at_once=False)
        if number >= 2:
            assert COUNT - capacity <= cache.stats.misses - before <= COUNT - capacity + 2 * RUNS_ON_THE_WAY + 2


def test_a_pass_that_fits_queues_all_of_its_reads() -> None:
    ledger = ledger_of(capacity=16)
    _, misses = ledger.request(0, experts_of(0, 4))
    ledger.queue_and_lease(misses)
    assert list(ledger.demand) == misses


def test_a_pass_that_does_not_fit_queues_what_keeps_the_readers_busy() -> None:
    ledger = ledger_of(capacity=16)
    _, misses = ledger.request(0, experts_of(0, 5))
    ledger.queue_and_lease(misses)
    assert list(ledger.demand) == misses[:RUNS_ON_THE_WAY]
    for index in ledger.next_read():
        ledger.arrive(index)
    ledger.queue_and_lease(misses)
    assert list(ledger.demand) == misses[1 : 1 + RUNS_ON_THE_WAY]


def test_what_arrived_meanwhile_is_leased_before_its_turn() -> None:
    """An expert that was being read ahead needs no place in the queue."""
    ledger = ledger_of(capacity=16, pinned=1)
    last = experts_of(1)[-1]
    ledger.advise([last])
    assert ledger.next_read() == [last]
    _, misses = ledger.request(1, experts_of(1))
    ledger.queue_and_lease(misses)
    assert ledger.is_leased[last] and ledger.stats.late_hits == 1


def test_advice_waits_for_the_last_miss() -> None:
    ledger = ledger_of(capacity=16, pinned=8)
    _, misses = ledger.request(0, experts_of(0))
    ledger.queue_and_lease(misses)
    ledger.advise(experts_of(1))
    assert not ledger.advice
    while misses:
        for index in ledger.next_read():
            ledger.arrive(index)
            ledger.is_leased[index] = False
            misses.remove(index)
        ledger.queue_and_lease(misses)
    assert list(ledger.advice) == experts_of(1, RUNS_ON_THE_WAY)
    assert [ledger.next_read() for _ in range(RUNS_ON_THE_WAY + 1)] == [[8], [9], []]  # and no more of it


def test_advice_after_a_layer_that_gave_up_is_queued() -> None:
    ledger = ledger_of(capacity=16, pinned=8)
    _, misses = ledger.request(0, experts_of(0))
    ledger.queue_and_lease(misses)
    ledger.is_leased[:] = False
    ledger.advise(experts_of(1))
    assert list(ledger.advice) == experts_of(1, RUNS_ON_THE_WAY)


def test_the_score_counts_the_distance_of_a_layer_only_if_a_pass_does_not_fit() -> None:
    """With layer 1 running, the distances of layers 0 to 3 are 3, 4, 1 and 2."""
    records = expert_records(LAYER, np.ones(COUNT), LAYERS)
    assert np.array_equal(lrfu_score(records, 1), records.heat)
    records.fits_pass = False
    lost = records.heat - lrfu_score(records, 1)
    assert lost.reshape(LAYERS, EXPERTS)[:, 0] == pytest.approx(np.log2([3, 4, 1, 2]))
