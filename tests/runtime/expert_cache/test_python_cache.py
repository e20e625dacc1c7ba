"""The cache in Python against a ledger of the storage, failing storage, its warm start, and passes that do not fit."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded, StorageReadFailed
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.eviction import eviction_order
from moec.runtime.expert_cache.instant_cache import InstantCache
from moec.runtime.expert_cache.policies import SCORES, lrfu_score
from moec.runtime.expert_cache.records import expert_records
from moec.runtime.expert_cache.residency import Residency
from moec.runtime.storage.read_runs import MAX_RUN_BYTES, NONE, RUNS_ON_THE_WAY, ReadRuns
from moec.runtime.storage.readers import ReaderThreads
from tests.runtime.faulty_source import (
    COUNT,
    EXPERTS,
    LAYERS,
    InTime,
    after,
    consume,
    each,
    make_cache,
    wait_for,
    warmed,
)


class CacheMachine(RuleBasedStateMachine):
    """Streams, whole, given up, or with a consumer that raises; advice; storage that fails now and then."""

    @initialize(
        sizes=st.lists(st.sampled_from((10, 10, 20, 30)), min_size=COUNT, max_size=COUNT),
        capacity=st.integers(30, 200),
        pins=st.integers(0, 200),
        policy=st.sampled_from(sorted(SCORES)),
        warm=st.booleans(),
        contiguous=st.booleans(),
    )
    def begin(self, sizes: list[int], capacity: int, pins: int, policy: str, warm: bool, contiguous: bool) -> None:
        self.source, self.cache = make_cache(sizes, capacity, policy, min(pins, capacity), is_contiguous=contiguous)
        self.lookups = 0
        if warm:
            self.cache.warm(range(COUNT))
            self.cache.finish_warming()
            assert self.cache.stats.evictions == 0

    layers = st.integers(0, LAYERS - 1)
    chosen = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True)
    advised = st.lists(st.integers(0, COUNT - 1), max_size=6)

    @rule(layer=layers, experts=chosen, advice=advised, stop=st.integers(1, EXPERTS), all_at_once=st.booleans())
    def stream(self, layer: int, experts: list[int], advice: list[int], stop: int, all_at_once: bool) -> None:
        indices = [layer * EXPERTS + expert for expert in experts]
        resident = set(self.cache.resident().tolist()) & set(indices)
        before = self.cache.stats.copy()
        self.lookups += len(indices)
        try:
            found = consume(self.source, self.cache, layer, indices, stop, advice, all_at_once)
        except StorageReadFailed as error:
            assert int(error.message.split()[1]) in self.source.failing & set(indices)
        else:
            least = min(stop, len(indices))
            assert len(found) == len(set(found)) >= least and set(found) <= set(indices)
            assert all_at_once or len(found) == least
            assert not set(found) & self.source.failing - resident - set(self.source.reads)
        gained = self.cache.stats.since(before)
        assert gained.lookups == gained.hits + gained.misses == len(indices) and gained.hits >= len(resident)

    @rule(layer=layers, experts=chosen)
    def raising_consumer(self, layer: int, experts: list[int]) -> None:
        self.lookups += len(experts)
        stream = self.cache.stream(layer, [layer * EXPERTS + expert for expert in experts])
        with contextlib.suppress(StorageReadFailed, ZeroDivisionError), contextlib.closing(stream):
            for some in stream:
                raise ZeroDivisionError(some)

    @rule(advice=advised)
    def prefetch(self, advice: list[int]) -> None:
        self.cache.prefetch(advice)

    @rule(failing=st.sets(st.integers(0, COUNT - 1), max_size=3))
    def break_or_repair(self, failing: set[int]) -> None:
        self.source.failing = failing

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        assert self.source.complaints == [] and not self.cache.leased().size
        stats = self.cache.stats
        assert stats.lookups == stats.hits + stats.misses == self.lookups
        assert stats.prefetch_used <= stats.prefetch_reads <= stats.reads
        assert stats.late_hits <= stats.misses and stats.prefetch_hits <= stats.prefetch_used

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.close()
        self.holds()
        # The reader has stopped: the accounts of both sides are final.
        stats, source = self.cache.stats, self.source
        assert stats.reads + stats.warm_reads == len(source.reads)
        assert stats.evictions == source.releases - source.failures
        # The warm start reads first, and in order.
        assert stats.bytes_read == sum(int(source.sizes[i]) for i in source.reads[stats.warm_reads :])
        assert stats.rereads == len(source.reads) - len(set(source.reads))
        assert set(self.cache.resident().tolist()) == source.loaded


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=25)


def test_capacity_under_one_expert_is_an_error_not_a_hang(in_time: InTime) -> None:
    _, cache = make_cache([10, 50], 40)
    for _ in range(2):
        with pytest.raises(MemoryBudgetExceeded, match="expert of 50 bytes does not fit into the expert cache of 40"):
            in_time(lambda: each(cache.stream(0, [0, 1])))
        assert in_time(lambda: each(cache.stream(0, [0]))) == [0]
        cache.check_invariants()
    assert not cache.leased().size
    cache.close()


def test_more_experts_than_room_come_in_waves(in_time: InTime) -> None:
    source, cache = make_cache([10] * 40, 20)
    assert sorted(in_time(lambda: consume(source, cache, 0, list(range(40)), 40, [1, 2, 3]))) == list(range(40))
    assert source.complaints == [] and cache.stats.evictions >= 38
    cache.close()


def test_hits_come_first_and_misses_load_meanwhile(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40)
    warmed(cache, [2, 3])
    source.gate.clear()
    stream = cache.stream(0, [0, 2, 1, 3])
    assert [next(stream), next(stream)] == [[2], [3]]
    source.gate.set()
    assert sorted(in_time(lambda: each(stream))) == [0, 1]
    assert (cache.stats.hits, cache.stats.misses) == (2, 2)
    cache.close()


def test_neighbours_that_wait_are_read_at_once(in_time: InTime) -> None:
    """Neighbours that a layer requests are read at once. So are those of advice, which comes after requests."""
    source, cache = make_cache([10] * 12, 120, is_contiguous=True)
    assert in_time(lambda: each(cache.stream(0, [3, 0, 2]))) == [3, 0, 2]
    assert source.begun == 2 and source.runs == 1 and sorted(source.reads) == [0, 2, 3]
    assert (cache.stats.reads, cache.stats.bytes_read) == (3, 30)
    source.gate.clear()
    cache.prefetch([8, 5, 9, 10])
    in_time(lambda: wait_for(lambda: source.begun == 3))
    stream = cache.stream(1, [5, 4])
    after(lambda: {4, 5} <= set(cache.leased().tolist()), source.gate.set)
    assert sorted(in_time(lambda: each(stream))) == [4, 5]
    assert source.reads[3:] == [8, 9, 10, 4, 5] and cache.stats.prefetch_reads == 3
    cache.close()


def test_one_that_fails_in_a_run_costs_its_neighbours_nothing(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40, is_contiguous=True)
    source.failing = {1}
    stream = cache.stream(0, [0, 1, 2])
    with pytest.raises(StorageReadFailed, match="expert 1"):
        in_time(lambda: list(stream))
    in_time(lambda: wait_for(lambda: {0, 2} <= set(cache.resident().tolist())))
    source.failing = set()
    assert sorted(in_time(lambda: each(cache.stream(0, [0, 1, 2])))) == [0, 1, 2]
    assert cache.stats.reads == 3 and source.complaints == []
    cache.close()


def test_what_is_there_together_comes_together(in_time: InTime) -> None:
    source, cache = make_cache([10] * 6, 60)
    warmed(cache, [2, 3])
    source.gate.clear()
    stream = cache.stream(0, [0, 2, 1, 3], all_at_once=True)
    assert next(stream) == [2, 3] and {2, 3} <= set(cache.leased().tolist())
    source.gate.set()
    in_time(lambda: wait_for(lambda: {0, 1} <= set(cache.resident().tolist())))
    assert in_time(lambda: list(stream)) == [[0, 1]]
    assert not cache.leased().size
    cache.close()


def test_what_comes_next_is_looked_for_while_misses_load(in_time: InTime) -> None:
    """After the first hits, because its reads come after the misses. At once without misses, or without hits."""
    source, cache = make_cache([10] * 12, 120)
    warmed(cache, [2, 3])
    seen: list[str] = []

    def look_ahead() -> list[int]:
        asked = {0, 1}.intersection(cache.leased().tolist())
        seen.append(f"look ahead, {len(asked)} of this layer's reads asked for")
        return []

    for indices, first in (([0, 2, 3], "computed [2, 3]"), ([2, 3], "look ahead, 0"), ([1], "look ahead, 1")):
        seen.clear()
        source.begun = 0
        source.gate.clear()
        stream = cache.stream(0, indices, look_ahead, all_at_once=True)
        waiter = threading.Thread(target=lambda own=stream: seen.extend(f"computed {some}" for some in own))
        waiter.start()
        in_time(lambda: wait_for(lambda: any("look" in each for each in seen)))
        source.gate.set()
        in_time(waiter.join)
        assert seen[0].startswith(first) and sum("look" in each for each in seen) == 1
    assert "look ahead, 1" in seen[0]
    cache.close()


def test_advice_that_its_layer_did_not_follow_is_not_read(in_time: InTime) -> None:
    source, cache = make_cache([10] * 12, 120)
    source.gate.clear()
    cache.prefetch([8, 0, 1, 5])  # 8 is being read; two of layer 0, one of layer 1 wait
    in_time(lambda: wait_for(lambda: cache.is_loading_or_resident(8)))
    asking = threading.Thread(target=lambda: each(cache.stream(0, [1])))
    asking.start()
    in_time(lambda: wait_for(lambda: cache.stats.misses == 1))
    source.gate.set()
    in_time(asking.join)
    in_time(lambda: wait_for(lambda: 5 in source.loaded))
    assert 0 not in source.reads
    cache.check_invariants()
    cache.close()


def test_a_failed_read_is_raised_once_and_may_be_tried_again(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40)
    source.failing = {1}
    with pytest.raises(StorageReadFailed, match="expert 1"):
        in_time(lambda: each(cache.stream(0, [1])))
    assert in_time(lambda: each(cache.stream(0, [0, 2]))) == [0, 2]
    with pytest.raises(StorageReadFailed, match="expert 1"):
        in_time(lambda: each(cache.stream(0, [1])))
    source.failing = set()
    assert in_time(lambda: each(cache.stream(0, [1]))) == [1]
    # What the failed read had already brought in was given back.
    assert source.complaints == [] and source.failures == 2
    cache.close()


def test_failures_nobody_waits_for_do_not_haunt_the_next_stream(in_time: InTime) -> None:
    source, cache = make_cache([10] * 6, 60)
    source.failing = {1, 2}
    with pytest.raises(StorageReadFailed):
        in_time(lambda: each(cache.stream(0, [1, 2])))
    warmed(cache, [0])
    source.gate.clear()
    with contextlib.closing(cache.stream(0, [0, 1, 2])) as given_up:
        assert next(given_up) == [0]
    source.gate.set()
    assert sorted(in_time(lambda: each(cache.stream(0, [3, 4])))) == [3, 4]
    source.failing = set()
    assert sorted(in_time(lambda: each(cache.stream(0, [1, 2])))) == [1, 2]
    cache.check_invariants()
    cache.close()


def test_advice_that_was_not_begun_is_no_prefetch(in_time: InTime) -> None:
    source, cache = make_cache([10] * 6, 60, pins=40)
    source.gate.clear()
    cache.prefetch([1, 2])
    in_time(lambda: wait_for(lambda: source.begun == 1))
    stream = cache.stream(0, [2])
    after(lambda: 2 in cache.leased(), source.gate.set)
    assert in_time(lambda: list(stream)) == [[2]]
    assert (cache.stats.misses, cache.stats.late_hits, cache.stats.prefetch_used) == (1, 0, 0)
    assert in_time(lambda: list(cache.stream(0, [1]))) == [[1]]
    assert (cache.stats.prefetch_reads, cache.stats.prefetch_used) == (1, 1)
    assert cache.stats.prefetch_precision == 1.0
    cache.close()


def test_reads_behind_a_failed_one_still_wait(in_time: InTime) -> None:
    source, cache = make_cache([10] * 6, 60)
    source.failing, source.ungated = {0}, {0}
    source.gate.clear()
    with pytest.raises(StorageReadFailed):
        in_time(lambda: each(cache.stream(0, [0, 1, 2])))
    after(lambda: 2 in cache.leased(), source.gate.set)
    assert sorted(in_time(lambda: each(cache.stream(0, [1, 2])))) == [1, 2]
    cache.check_invariants()
    cache.close()


def test_a_failed_prefetch_is_harmless(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40)
    source.failing = {1}
    cache.prefetch([1, 2])
    in_time(lambda: wait_for(lambda: 2 in source.loaded))
    assert in_time(lambda: each(cache.stream(0, [3]))) == [3]
    source.failing = set()
    assert sorted(in_time(lambda: each(cache.stream(0, [1, 2])))) == [1, 2]
    cache.close()
    assert (cache.stats.prefetch_reads, cache.stats.prefetch_used, cache.stats.late_hits) == (1, 1, 0)


def test_reads_of_a_stream_that_was_given_up_make_room(in_time: InTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes are reserved, no layer leases them, and no reader has begun. Expert 0 has no bytes: always there."""
    _, cache = make_cache([0, 10, 20, 30], 30)
    with monkeypatch.context() as not_yet:
        not_yet.setattr(ReaderThreads, "start", lambda readers: None)
        with contextlib.closing(cache.stream(0, [0, 1, 2])) as given_up:
            assert next(given_up) == [0]
    assert (
        cache.used_bytes == 30
        and not cache.leased().size
        and not cache.is_loading_or_resident(1)
        and not cache.is_loading_or_resident(2)
    )
    assert in_time(lambda: each(cache.stream(0, [3]))) == [3]
    cache.check_invariants()
    cache.close()


def test_prefetch_never_changes_what_is_yielded(in_time: InTime) -> None:
    generator = np.random.default_rng(0)
    steps = [(n % LAYERS, (n % LAYERS * EXPERTS + generator.permutation(EXPERTS)[:3]).tolist()) for n in range(60)]
    advice = [generator.integers(0, COUNT, 4).tolist() for _ in steps]

    def run(with_advice: bool) -> list[list[int]]:
        source, cache = make_cache([10] * COUNT, 50)
        found = [
            sorted(consume(source, cache, layer, indices, advice=advised if with_advice else ()))
            for (layer, indices), advised in zip(steps, advice, strict=True)
        ]
        cache.close()
        assert (cache.stats.prefetch_reads > 0) == with_advice and source.complaints == []
        return found

    assert in_time(lambda: run(False)) == in_time(lambda: run(True)) == [sorted(indices) for _, indices in steps]


def test_pins_stay_under_their_limit_and_yield_to_demand(in_time: InTime) -> None:
    source, cache = make_cache([10] * 8, 40, pins=20)
    cache.prefetch([4, 5, 6])
    assert cache.used_bytes == 20
    assert in_time(lambda: each(cache.stream(0, [0, 1]))) and source.complaints == []
    in_time(lambda: wait_for(lambda: set(cache.resident().tolist()) == {0, 1, 4, 5}))
    # Unpinned experts go first, the worst prediction next, the best last.
    assert each(cache.stream(0, [2, 3])) == [2, 3]
    assert set(cache.resident().tolist()) == {2, 3, 4, 5}
    assert sorted(in_time(lambda: each(cache.stream(0, [0, 2, 3])))) == [0, 2, 3]
    assert set(cache.resident().tolist()) == {0, 2, 3, 4}
    cache.close()


def test_a_closed_cache_says_so(in_time: InTime) -> None:
    _, cache = make_cache([10] * 4, 40)
    assert each(cache.stream(0, [0])) == [0]
    cache.close()
    cache.close()
    for indices in ([0], [1]):
        with pytest.raises(ExecutionError, match="closed"):
            in_time(lambda wanted=indices: each(cache.stream(0, wanted)))


def test_closing_wakes_who_waits(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40)
    source.gate.clear()
    closing = after(lambda: source.begun > 0, cache.close)
    with pytest.raises(ExecutionError, match="closed"):
        in_time(lambda: each(cache.stream(0, [0, 1])))
    source.gate.set()
    in_time(closing.join)


def test_the_warm_start_leaves_out_what_cannot_be_read(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40)
    source.failing = {2}
    warmed(cache, [0, 2, 1])
    cache.check_invariants()
    assert source.loaded == {0, 1} and each(cache.stream(0, [0, 1])) == [0, 1]
    with pytest.raises(StorageReadFailed, match="expert 2"):
        in_time(lambda: each(cache.stream(0, [2])))
    assert (cache.stats.warm_reads, cache.stats.reads, cache.stats.hits) == (2, 0, 2)
    cache.close()


def test_demand_overtakes_the_warm_start(in_time: InTime) -> None:
    source, cache = make_cache([10] * 8, 80)
    source.gate.clear()
    cache.warm(range(7))
    in_time(lambda: wait_for(lambda: cache.is_loading_or_resident(0)))
    stream = cache.stream(0, [7])
    found = threading.Thread(target=lambda: each(stream))
    found.start()
    in_time(lambda: wait_for(lambda: 7 in cache.leased()))
    source.gate.set()
    in_time(found.join)
    in_time(cache.finish_warming)
    assert source.reads[:2] == [0, 7] and sorted(source.reads) == list(range(8))
    assert cache.stats.busy_ns > 0
    cache.close()


def test_several_readers_read_side_by_side(in_time: InTime) -> None:
    source, cache = make_cache([10] * 6, 60, readers=3)
    source.gate.clear()
    stream = cache.stream(0, [0, 1, 2, 3])
    waiting = threading.Thread(target=lambda: each(stream))
    waiting.start()
    in_time(lambda: wait_for(lambda: sum(map(cache.is_loading_or_resident, range(4))) == 3))
    source.gate.set()
    in_time(waiting.join)
    cache.check_invariants()
    assert sorted(source.reads) == [0, 1, 2, 3] and source.complaints == []
    cache.close()


PASS_LAYERS, LAYER_EXPERTS = 4, 8
PASS_EXPERTS = PASS_LAYERS * LAYER_EXPERTS
LAYER_OF = np.arange(PASS_EXPERTS) // LAYER_EXPERTS
LARGE = np.full(PASS_EXPERTS, MAX_RUN_BYTES)


def spec_of(capacity: int, pinned: int = 0) -> CacheSpec:
    """Return a cache for some of the experts. All of them were equally popular."""
    records = expert_records(LAYER_OF, np.ones(PASS_EXPERTS), PASS_LAYERS)
    return CacheSpec(LARGE, capacity * MAX_RUN_BYTES, records, pinned * MAX_RUN_BYTES)


def ledger_of(capacity: int, pinned: int = 0) -> Residency:
    spec = spec_of(capacity, pinned)
    order = partial(eviction_order, spec.records, lrfu_score)
    return Residency(spec, order, runs=ReadRuns(LARGE.tolist(), [NONE] * PASS_EXPERTS))


def experts_of(layer: int, count: int = LAYER_EXPERTS) -> list[int]:
    return list(range(layer * LAYER_EXPERTS, layer * LAYER_EXPERTS + count))


@pytest.mark.parametrize("capacity", [12, 16, 24, 31])
def test_a_pass_over_all_experts_reads_what_the_cache_cannot_hold(capacity: int) -> None:
    """No cache misses less than PASS_EXPERTS - capacity. The reads under way take a few places more."""
    cache = InstantCache(spec_of(capacity), lrfu_score)
    for number in range(12):
        before = cache.stats.misses
        for layer in range(PASS_LAYERS):
            cache.serve(layer, experts_of(layer), all_at_once=False)
        if number >= 2:
            assert (
                PASS_EXPERTS - capacity
                <= cache.stats.misses - before
                <= PASS_EXPERTS - capacity + 2 * RUNS_ON_THE_WAY + 2
            )


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
    records = expert_records(LAYER_OF, np.ones(PASS_EXPERTS), PASS_LAYERS)
    assert np.array_equal(lrfu_score(records, 1), records.heat)
    records.fits_pass = False
    lost = records.heat - lrfu_score(records, 1)
    assert lost.reshape(PASS_LAYERS, LAYER_EXPERTS)[:, 0] == pytest.approx(np.log2([3, 4, 1, 2]))
