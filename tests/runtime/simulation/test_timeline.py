"""Timelines computed by hand, and the simulated cache compared with the real one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import MemoryBudgetExceeded
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.policies import SCORES, PolicyScore
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.expert_cache.records import expert_records, warm_order
from moec.runtime.simulation.recorded_advice import no_advice, recorded_advice
from moec.runtime.simulation.replay import replay
from moec.runtime.simulation.timeline import (
    Advice,
    DeviceRates,
    Event,
    SimulatedMachine,
    Timeline,
    predict_steps,
    timed_pass,
)
from moec.runtime.trace.trace import Trace, TracedPass, TraceHeader
from tests.runtime.faulty_source import FaultySource

# One byte takes one nanosecond; a read waits 5 ns for its first.
RATES = DeviceRates(storage_bytes_per_s=10**9, storage_latency_ns=5, readers=1, compute_scale=1.0)
LAYERS, EXPERTS, TOP_K = 3, 4, 2
COUNT = LAYERS * EXPERTS
LAYER = np.repeat(np.arange(LAYERS), EXPERTS)


def one_token(
    chosen: list[list[int]], dense: int = 10, experts: int = 20, head: int = 0, advice: list[list[int]] | None = None
) -> TracedPass:
    layers = len(chosen)
    kernels = layers * (dense + experts) + head
    return TracedPass(
        tokens=1,
        chosen=tuple(map(tuple, chosen)),
        advice=tuple(map(tuple, advice or [[]] * layers)),
        dense_ns=(dense,) * layers,
        experts_ns=(experts,) * layers,
        shared_ns=(0,) * layers,
        head_ns=head,
        elapsed_ns=kernels,
        stall_ns=0,
    )


def trace_of(passes: list[TracedPass], experts: list[int], top_k: int) -> Trace:
    layers = len(experts)
    header = TraceHeader("0" * 64, tuple(experts), (top_k,) * layers, passes[0].tokens, "lookahead", 1, 1, 1, 1)
    return Trace(header, tuple(passes))


def timeline_of(
    trace: Trace,
    spec: CacheSpec,
    policy: str | PolicyScore,
    rates: DeviceRates,
    advice: Advice,
    warm: Sequence[int] = (),
) -> Timeline:
    """Return the times of a trace on a machine of these rates, without an accelerator."""
    steps = [(timed_pass(traced, trace.header.first_expert, advice),) for traced in trace.passes]
    return predict_steps(steps, trace.prompt_passes, spec, policy, SimulatedMachine(rates), warm)


def small(passes: list[TracedPass], capacity: int, rates: DeviceRates = RATES, pins: int = 0) -> Timeline:
    """One or more layers of two experts of 100 bytes each, top-1, LRU, cold."""
    layers = len(passes[0].chosen)
    records = expert_records(np.repeat(np.arange(layers), 2), np.zeros(2 * layers), layers)
    sizes = np.full(2 * layers, 100, np.int64)
    trace = trace_of(passes, [2] * layers, 1)
    return timeline_of(trace, CacheSpec(sizes, capacity, records, pins), "lru", rates, recorded_advice)


def test_a_miss_waits_for_its_read_and_a_hit_does_not() -> None:
    found = small([one_token([[0]]), one_token([[1]]), one_token([[0]]), one_token([[0]])], 100)
    # Misses: 10 dense + 5 latency + 100 bytes + 20 expert = 135. The last is a hit: 30.
    assert found.ttft_ns == 135
    assert (found.tpot_p50_ns, found.tpot_p95_ns, found.tpot_mean_ns) == (135, 135, 100)
    cache = found.cache
    assert (cache.misses, cache.hits, cache.evictions, cache.rereads, cache.bytes_read) == (3, 1, 2, 1, 300)
    assert found.stall == pytest.approx(210 / 300) == found.busy
    assert found.decode_bytes_read_per_token == pytest.approx(200 / 3) and found.tokens == 4
    assert found.tokens_per_s == pytest.approx(1e7)


def test_hits_compute_while_misses_are_read() -> None:
    """Top-2: expert 0 is there and takes 10 of the 20 ns while expert 1 is read."""
    passes = [one_token([[0, 2]]), one_token([[0, 1]], experts=200)]
    records = expert_records(np.zeros(3, np.int64), np.zeros(3), 1)
    trace = trace_of(passes, [3], 2)
    found = timeline_of(trace, CacheSpec(np.full(3, 100, np.int64), 200, records), "lru", RATES, no_advice)
    # 10 dense, then the read of 105 under the 100 of expert 0, 5 more of waiting, 100 of expert 1.
    assert found.tpot_mean_ns == 10 + 105 + 100
    # Cold: one reader, both reads after one another, the first expert's 10 ns under the second read.
    assert found.ttft_ns == 10 + 105 + 105 + 10


def test_two_readers_hide_a_latency_but_share_the_bandwidth() -> None:
    records = expert_records(np.zeros(3, np.int64), np.zeros(3), 1)
    trace = trace_of([one_token([[0, 2]])], [3], 2)
    spec, two = CacheSpec(np.full(3, 100, np.int64), 200, records), replace(RATES, readers=2)
    assert timeline_of(trace, spec, "lru", two, no_advice).ttft_ns == 10 + 5 + 100 + 100 + 10


def test_neighbours_share_a_latency_and_arrive_together() -> None:
    spec = CacheSpec(np.full(3, 100, np.int64), 300, expert_records(np.zeros(3, np.int64), np.zeros(3), 1))
    trace = trace_of([one_token([[0, 2]]), one_token([[0, 1]])], [3], 2)
    steps = [(timed_pass(each, trace.header.first_expert, no_advice),) for each in trace.passes[:1]]
    apart = predict_steps(steps, 1, spec, "lru", SimulatedMachine(RATES))
    together = predict_steps(steps, 1, spec, "lru", SimulatedMachine(RATES, next_in_file=[2, -1, -1]))
    # Two latencies, the first expert's 10 ns under the second read; or one latency, and all computing after the run.
    assert (apart.ttft_ns, together.ttft_ns) == (10 + 105 + 105 + 10, 10 + 5 + 200 + 20)
    assert together.cache.reads == 2 and together.cache.bytes_read == 200


def test_advice_is_read_while_a_layer_computes() -> None:
    """Two layers. While layer 0 computes 200 ns, the expert of layer 1 arrives."""
    passes = [one_token([[0], [0]], experts=200, advice=[[2], []])]
    alone = small(passes, 400)
    ahead = small(passes, 400, pins=400)
    assert alone.ttft_ns == 2 * (10 + 105 + 200)
    assert ahead.ttft_ns == (10 + 105 + 200) + (10 + 200)
    cache = ahead.cache
    assert (cache.prefetch_reads, cache.prefetch_used, cache.hits, alone.cache.prefetch_reads) == (1, 1, 1, 0)


def test_demand_overtakes_advice_that_has_not_begun_and_waits_for_what_has() -> None:
    # Layer 0 advises both experts of layer 1, layer 1 wants the second: the first is being read and goes on.
    passes = [one_token([[0], [1]], experts=40, advice=[[2, 3], []])]
    found = small(passes, 400, pins=400)
    # Layer 0 reads until 115, computes until 155, layer 1 is ready at 165: expert 2 arrives at 220, then 105 for 3.
    assert found.ttft_ns == 220 + 105 + 40
    assert (found.cache.late_hits, found.cache.prefetch_reads, found.cache.misses) == (0, 1, 2)
    # One reader later the wanted one is under way already.
    late = small([one_token([[0], [0]], experts=40, advice=[[2, 3], []])], 400, pins=400)
    assert late.ttft_ns == 220 + 40 and late.cache.late_hits == 1


def test_a_slower_processor_takes_longer_and_hides_more() -> None:
    passes = [one_token([[0], [0]], advice=[[2], []])]
    slow = small(passes, 400, replace(RATES, compute_scale=10.0), pins=400)
    assert slow.ttft_ns == (100 + 105 + 200) + (100 + 200)


def test_shared_experts_compute_under_the_reads_and_the_rest_between_layers() -> None:
    each = replace(one_token([[0]], head=7), shared_ns=(30,), elapsed_ns=10 + 20 + 30 + 7 + 3)
    assert each.other_ns == 3
    # 3 other, 10 dense, 105 read, 20 expert, 30 shared after it, 7 head.
    assert small([each], 100).ttft_ns == 3 + 10 + 105 + 20 + 30 + 7


def test_an_encoder_runs_once_and_its_experts_go_first() -> None:
    """One layer of an encoder and one of a decoder, two experts of 100 bytes each, room for two of the four."""
    records = expert_records(np.repeat(np.arange(2), 2), np.zeros(4), 2, encoder_layers=1)
    encoded = replace(one_token([[0, 1]], head=7), tokens=2)
    steps = [replace(one_token([[expert]]), first_layer=1) for expert in (0, 1, 0)]
    header = replace(trace_of([encoded], [2, 2], 1).header, first_decoder_layer=1)
    trace = Trace(header, (encoded, *steps))
    found = timeline_of(trace, CacheSpec(np.full(4, 100, np.int64), 200, records), "lru", RATES, recorded_advice)
    # Encoder: 10 dense, 105 and 105 of reads with the first expert's 10 under the second, 10, 7 of the head. Then the
    # decoder's first token, for which an expert of the encoder goes: 10, 105, 20.
    assert found.ttft_ns == 10 + 105 + 105 + 10 + 7 + 10 + 105 + 20
    # The second token's expert takes the place of the encoder's other one; the third hits.
    assert (found.tpot_p50_ns, found.tpot_p95_ns, found.tpot_mean_ns) == (30, 135, round((135 + 30) / 2))
    cache = found.cache
    assert (cache.misses, cache.hits, cache.evictions, cache.rereads, found.tokens) == (4, 1, 2, 0, 3)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(MemoryBudgetExceeded, match="an expert of 100 bytes does not fit into the expert cache of 99"):
        small([one_token([[0]])], 99)


@st.composite
def traces(draw: st.DrawFn, prompt: int = 3) -> Trace:
    choice = st.permutations(range(EXPERTS)).map(lambda order: order[:TOP_K])
    passes = []
    for tokens in (draw(st.integers(1, prompt)), *[1] * draw(st.integers(0, 8))):
        chosen = [[e for _ in range(tokens) for e in draw(choice)] for _ in range(LAYERS)]
        advice = draw(st.lists(st.lists(st.integers(0, COUNT - 1), max_size=4, unique=True), min_size=3, max_size=3))
        each = one_token(chosen, dense=draw(st.integers(0, 300)), experts=draw(st.integers(0, 300)), advice=advice)
        passes.append(replace(each, tokens=tokens))
    return trace_of(passes, [EXPERTS] * LAYERS, TOP_K)


rates = st.builds(
    DeviceRates,
    storage_bytes_per_s=st.sampled_from((10**7, 10**8, 10**9, 10**10)),
    storage_latency_ns=st.integers(0, 200),
    readers=st.integers(1, 3),
    compute_scale=st.sampled_from((0.1, 1.0, 3.0)),
)
sizes_of = st.lists(st.integers(1, 9), min_size=COUNT, max_size=COUNT).map(lambda n: np.array(n, np.int64))
popularities = st.lists(st.integers(0, 20), min_size=COUNT, max_size=COUNT).map(lambda n: np.array(n, np.float64))


@given(traces(), sizes_of, popularities, st.integers(0, 60), st.sampled_from((*sorted(SCORES), "optimum")), rates)
def test_without_advice_time_changes_no_count(
    trace: Trace, sizes: np.ndarray, popularity: np.ndarray, room: int, policy: str, device: DeviceRates
) -> None:
    """The counts of the replay, which are those of the real cache; faster storage is never slower."""
    capacity, records = TOP_K * int(sizes.max()) + room, expert_records(LAYER, popularity, LAYERS)
    spec, warm = CacheSpec(sizes, capacity, records, capacity), warm_order(records).tolist()
    found = timeline_of(trace, spec, policy, device, no_advice, warm)
    counts = replay(trace.accesses(), spec, policy, warm)
    assert found.cache.replayable_counts() == counts.replayable_counts()
    again = timeline_of(trace, spec, policy, device, no_advice, warm)
    assert again == found
    faster = replace(device, storage_bytes_per_s=2 * device.storage_bytes_per_s)
    better = timeline_of(trace, spec, policy, faster, no_advice, warm)
    # Reads end at whole nanoseconds: a first token that is one earlier may leave that one to the others.
    assert better.ttft_ns <= found.ttft_ns and (better.tpot_mean_ns or 0) <= (found.tpot_mean_ns or 0) + 1


@given(traces(), sizes_of, popularities, st.integers(0, 60), rates, st.integers(0, 80))
def test_advice_keeps_the_ledger_and_bounds_the_time(
    trace: Trace, sizes: np.ndarray, popularity: np.ndarray, room: int, device: DeviceRates, pins: int
) -> None:
    capacity, records = TOP_K * int(sizes.max()) + room, expert_records(LAYER, popularity, LAYERS)
    spec = CacheSpec(sizes, capacity, records, min(pins, capacity))
    found = timeline_of(trace, spec, "lrfu", device, recorded_advice)
    assert found.cache.prefetch_used <= found.cache.prefetch_reads and found.cache.late_hits <= found.cache.misses
    assert 0 <= found.stall <= 1 and 0 <= found.busy <= 1
    steps = (found.tpot_mean_ns or 0) * (found.tokens - 1) + found.ttft_ns
    compute = sum(round(each.elapsed_ns * device.compute_scale) for each in trace.passes)
    # Whatever is read ahead, computing takes its time; each of up to 10 rounded parts of a layer may lose half a unit.
    assert steps >= compute - 10 * LAYERS * len(trace.passes)


def wait_until_idle(cache: PythonCache, sizes: np.ndarray) -> None:
    """Return when all that has room reserved is resident. The bytes are asked for first: reads only end meanwhile."""
    while cache.used_bytes != sizes[cache.resident()].sum():
        time.sleep(0.0002)


@given(
    traces(prompt=1), sizes_of, popularities, st.integers(0, 60), st.sampled_from(sorted(SCORES)), st.integers(0, 80)
)
def test_with_advice_that_is_always_in_time_the_counts_are_those_of_the_real_cache(
    trace: Trace, sizes: np.ndarray, popularity: np.ndarray, room: int, policy: str, pins: int
) -> None:
    capacity = TOP_K * int(sizes.max()) + room
    pins = min(pins, room)
    fast = DeviceRates(storage_bytes_per_s=10**12, storage_latency_ns=0, readers=1, compute_scale=1.0)
    slow = Trace(trace.header, tuple(replace(each, experts_ns=(10**6,) * LAYERS) for each in trace.passes))
    records = expert_records(LAYER, popularity, LAYERS)
    found = timeline_of(slow, CacheSpec(sizes, capacity, records, pins), policy, fast, recorded_advice)

    score = SCORES[policy]  # type: ignore[index]
    own = CacheSpec(sizes, capacity, expert_records(LAYER, popularity, LAYERS), pins)
    cache = PythonCache(FaultySource(sizes, capacity), own, score)
    for each in trace.passes:
        for layer, experts in each.accesses(trace.header.first_expert):
            for _ in cache.stream(layer, experts, partial(tuple, each.advice[layer]), all_at_once=True):
                wait_until_idle(cache, sizes)
    cache.close()
    assert found.cache.replayable_counts() == cache.stats.replayable_counts()


def watched(passes: list[TracedPass], capacity: int) -> tuple[Timeline, list[Event]]:
    """Return the timeline of two layers, and the events that the simulator told."""
    records = expert_records(np.repeat(np.arange(2), 2), np.zeros(4), 2)
    spec = CacheSpec(np.full(4, 100, np.int64), capacity, records, capacity)
    trace, events = trace_of(passes, [2, 2], 1), list[Event]()
    steps = [(timed_pass(each, trace.header.first_expert, recorded_advice),) for each in trace.passes]
    return predict_steps(steps, 1, spec, "lru", SimulatedMachine(RATES, watch=events.append)), events


def _begin(event: Event) -> tuple[int, int]:
    return event.begin_ns, event.end_ns


def test_events_tell_what_takes_the_time() -> None:
    found, events = watched([one_token([[0], [0]], experts=40, head=7, advice=[[2], []])], 400)
    told = [(event.kind, event.begin_ns, event.end_ns, event.layer) for event in sorted(events, key=_begin)]
    # 10 dense, a read of 105 that layer 0 waits for, 40 of its expert; the expert of layer 1 is read ahead meanwhile.
    assert told == [
        ("dense", 0, 10, 0),
        ("read", 10, 115, 0),
        ("wait", 10, 115, 0),
        ("experts", 115, 155, 0),
        ("ahead", 115, 220, 1),
        ("dense", 155, 165, 1),
        ("wait", 165, 220, 1),
        ("experts", 220, 260, 1),
        ("head", 260, 267, None),
    ]
    assert found.ttft_ns == 267


def test_watching_changes_nothing_and_accounts_for_all_time() -> None:
    passes = [one_token([[at % 2], [at % 3 % 2]], head=3, advice=[[2 + at % 2], []]) for at in range(9)]
    found, events = watched(passes, 200)
    records = expert_records(np.repeat(np.arange(2), 2), np.zeros(4), 2)
    spec = CacheSpec(np.full(4, 100, np.int64), 200, records, 200)
    assert found == timeline_of(trace_of(passes, [2, 2], 1), spec, "lru", RATES, recorded_advice)
    own = [event for event in events if event.kind not in ("read", "ahead")]
    assert sum(event.end_ns - event.begin_ns for event in own) == max(event.end_ns for event in own)
    waited = sum(event.end_ns - event.begin_ns for event in own if event.kind == "wait")
    assert waited > 0
