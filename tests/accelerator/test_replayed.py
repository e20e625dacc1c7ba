"""A replayed trace with an accelerator, compared with results by hand, the clock of the planner, and a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.accelerator.workload import layer_ns
from moec.cli.measuring.decode_speed import measure_decode, new_tracer
from moec.cli.simulation.predictions import Simulation
from moec.cli.simulation.simulated_device import AcceleratorRates, parse_accelerator, shared_device
from moec.cli.simulation.traces import recorded_trace, replayed_bundle
from moec.manifests.errors import OptionError
from moec.profiles.loading import load_profile
from moec.runtime.accelerator.latency import LatencyModel
from moec.runtime.accelerator.placement import LIBRARY_BYTES
from moec.runtime.accelerator.planner import ExpertLoad
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.records import expert_records
from moec.runtime.options.lossy import setting_text
from moec.runtime.options.runtime import COOPERATIONS, Cooperation, RuntimeOptions
from moec.runtime.simulation.accelerator_replay import ReplayedDevice, traced_cpu_line
from moec.runtime.simulation.recorded_advice import recorded_advice
from moec.runtime.simulation.timeline import DeviceRates, SimulatedMachine, TimedPass, Timeline, predict_steps
from tests.runtime.simulation.test_timeline import RATES, one_token, trace_of

from .conftest import memory_for

EVEN = LatencyModel(10.0, 0.0, 50.0, 0.0, 0.25, 0.5)
TOKENS = np.random.default_rng(3).integers(4, 260, 44).tolist()
PROMPT_TOKENS = 20


def one_layer(
    passes: list[TimedPass], shared: ReplayedDevice, capacity: int = 1000, warm: tuple[int, ...] = ()
) -> Timeline:
    """Four experts of 100 bytes, LRU; the first pass is the prompt."""
    records = expert_records(np.zeros(4, np.int64), np.zeros(4), 1)
    spec = CacheSpec(np.full(4, 100, np.int64), capacity, records)
    return predict_steps([(each,) for each in passes], 1, spec, "lru", SimulatedMachine(RATES, shared), warm)


def token(*experts: int, experts_ns: float = 20.0) -> TimedPass:
    """A pass of one token: 10 ns of dense weights, then experts."""
    return TimedPass(1, ((0, experts),), ((),), (10.0,), (experts_ns,), (0.0,), 0.0, 0.0)


def on_device(cooperation: Cooperation, *resident: int, latency: LatencyModel = EVEN) -> ReplayedDevice:
    return ReplayedDevice(latency, (100,) * 4, frozenset(resident), cooperation)


def test_the_device_computes_while_the_processor_waits_for_a_read() -> None:
    """Expert 0 takes the device 50 ns; expert 1 is read in 5 + 100 and computed in 10."""
    found = one_layer([token(0, 1), token(0, 1)], on_device("cpu", 0))
    assert found.ttft_ns == 10 + 105 + 10
    # Then it is there: 10 ns here while the device takes 50.
    assert found.tpot_mean_ns == 10 + 50
    assert found.cache.bytes_read == 100 and found.cache.lookups == 2, "what is on the device is never asked for"
    assert found.to_plain()["experts"] == {"resident": 2, "copied": 0, "cpu": 2, "copied_bytes": 0}


def test_a_copy_takes_the_processor_then_the_link_then_the_device() -> None:
    found = one_layer([token(0, 1)], on_device("gpu", 0))
    assert found.ttft_ns == 10 + 105 + 25 + 50 + 50
    assert found.cooperation is not None and found.cooperation.copied_bytes == 100


def test_without_residents_and_copies_the_device_changes_nothing() -> None:
    passes = [token(0, 1), token(1, 2), token(3, 0)]
    spec = CacheSpec(np.full(4, 100, np.int64), 200, expert_records(np.zeros(4, np.int64), np.zeros(4), 1))
    alone = predict_steps([(each,) for each in passes], 1, spec, "lru", SimulatedMachine(RATES))
    found = one_layer(passes, on_device("cpu"), capacity=200)
    same = {**found.to_plain(), "experts": None}
    assert same == alone.to_plain()


@pytest.mark.parametrize("cooperation", COOPERATIONS)
@pytest.mark.parametrize("seed", range(8))
def test_in_memory_a_layer_takes_what_the_planners_clock_says(seed: int, cooperation: Cooperation) -> None:
    draws = np.random.default_rng(seed)
    latency = LatencyModel(*draws.uniform(1e3, 2e4, 2), *draws.uniform(1e3, 2e4, 2), *draws.uniform(0, 100, 2))
    resident = frozenset(draws.permutation(4)[: seed % 4].tolist())
    shared = ReplayedDevice(latency, (100,) * 4, resident, cooperation)
    loads = tuple(draws.integers(1, 9, 4).tolist())
    cpu_ns = sum(latency.cpu_ns(count) for count in loads)
    many = TimedPass(9, ((0, (0, 1, 2, 3)),), ((),), (10.0,), (cpu_ns,), (0.0,), 0.0, 0.0, loads=(loads,))
    found = one_layer([many], shared, warm=(0, 1, 2, 3))
    asked = [ExpertLoad(at, count, 100, at in resident, at in resident) for at, count in enumerate(loads)]
    assert found.ttft_ns == pytest.approx(10 + layer_ns(asked, latency, cooperation), abs=8)
    assert found.stall == 0 and found.cache.bytes_read == 0


def test_the_processors_line_is_that_of_the_trace() -> None:
    """A prompt of four tokens over two experts, then single ones: 8 ns an expert and 3 a token."""
    prompt = one_token([[0, 0, 1, 1]], experts=2 * (8 + 2 * 3))
    passes = [replace(prompt, tokens=4), one_token([[0]], experts=11), one_token([[1]], experts=11)]
    trace = trace_of(passes, [2], 1)
    assert traced_cpu_line(trace) == pytest.approx((8, 3))
    assert traced_cpu_line(trace, 2.0) == pytest.approx((16, 6))
    alone = trace_of(passes[1:], [2], 1)
    assert traced_cpu_line(alone) == (11.0, 0.0), "passes of one length say nothing of a token more"


@pytest.mark.parametrize(
    "modes", [{"dynamic_precision": "0.2,0.7"}, {"cache_routing": "margin=0.4,drop=0.1"}, {}], ids=str
)
def test_decisions_and_places_are_those_of_a_run(two_version_bundle: Path, modes: dict[str, str]) -> None:
    """The trace is of that very run, on torch's CPU device: what is low, skipped, and computed where agrees."""
    opened = open_bundle(two_version_bundle)
    replayed = replayed_bundle(opened)
    capacity = replayed.capacity_bytes(0.5)
    assert capacity is not None
    memory = str(memory_for(two_version_bundle, 0.4, 64, may_group=False))
    device = RuntimeOptions(
        expert_cache="50%", context=64, readers=1, prefetch="off", accelerator="torch-cpu",
        accelerator_memory=memory, accelerator_dense="host", cooperation="cpu", lossy=setting_text(modes),
    )  # fmt: skip
    with Engine(opened, device) as engine:
        engine.cache.finish_warming()
        tracer = new_tracer(engine)
        measure_decode(engine, TOKENS, PROMPT_TOKENS, tracer=tracer)
        trace = recorded_trace(engine, tracer, PROMPT_TOKENS, load_profile("laptop"))
        counts = engine.mode_counts
        accelerator = engine.model.accelerator
        assert accelerator is not None
        done, resident = accelerator.counts, frozenset(accelerator.placement.resident)
        bytes_read = engine.cache.stats.bytes_read
    assert 4 < len(resident) < 20
    rates = DeviceRates(10**6, 1000, 1, 1.0)
    # The replay is of a run with the whole context on cuda, which takes more memory in addition to the experts.
    longest = min(1024, opened.manifest.model.default_context)
    stated = AcceleratorRates(
        memory_for(two_version_bundle, 0.4, longest, may_group=True) + LIBRARY_BYTES, 1000, 0, 10**9
    )
    shared = shared_device(opened, trace, rates, stated, "cpu")
    assert shared.resident == resident
    simulation = Simulation(opened, trace, replayed, rates, "off", recorded_advice, shared)
    (row,) = simulation.rows([capacity], {"lrfu": "lrfu"}, [modes])
    assert (None if counts is None else counts.to_plain()) == row.decisions
    assert counts is None or counts.missed > 0
    assert row.timeline.cooperation == done and row.timeline.cache.bytes_read == bytes_read


def test_rates_are_read_or_refused() -> None:
    assert parse_accelerator("memory=8GiB, expert=600us,link=12GB") == AcceleratorRates(8 << 30, 600_000, 0, 12 * 10**9)
    assert parse_accelerator("token=2us,link=1GB,memory=1MiB,expert=1ms").token_ns == 2000
    for text, told in [
        ("memory=8GiB,expert=1ms", "does not say link"),
        ("memory=8GiB,memory=1GiB,expert=1ms,link=1GB", "`memory=1GiB` is not one of"),
        ("speed=3,expert=1ms,link=1GB", "`speed=3` is not one of"),
        ("memory=8GiB,expert=fast,link=1GB", "`fast` is not a time"),
        ("memory=8GiB,expert=1ms,link=0", "at least 1 byte"),
    ]:
        with pytest.raises(OptionError, match=told):
            parse_accelerator(text)
