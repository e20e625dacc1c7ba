"""Simulated workloads: reproducible, ordered as they must be, and the table of the benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from bench.accelerator.workload import STRATEGIES, Workload, decode_ns, pass_ns, prefill_ns
from moec.manifests.errors import MemoryBudgetExceeded
from moec.runtime.accelerator.latency import LatencyModel
from moec.runtime.simulation.accelerator_replay import SimulatedDevice
from tests.kernels.products import expert_of

SIZE = 1 << 20
LATENCY = LatencyModel(5e5, 5e4, 1e5, 0.0, 0.05, 0.5)
WORK = Workload(np.random.default_rng(0).integers(1, 100, (4, 8)), 2, SIZE, 1e4, 1e3, 1e5)


def test_every_token_chooses_so_many_different_experts() -> None:
    counts = WORK.draw(0, 500, np.random.default_rng(1))
    assert counts.sum() == 1000 and counts.max() <= 500
    assert np.corrcoef(counts, WORK.popularity[0])[0, 1] > 0.9


@pytest.mark.parametrize("tokens", [1, 12, 300, 2500])
def test_the_planner_is_first_and_runs_repeat(tokens: int) -> None:
    residents = WORK.residents(10)
    assert residents.sum() == 10
    times_ns = {name: prefill_ns(WORK, LATENCY, residents, name, tokens) for name in STRATEGIES}
    shared = [name for name in STRATEGIES if STRATEGIES[name] is not None]
    assert times_ns["planner"] == min(times_ns[name] for name in shared) < times_ns["CPU only"]
    assert times_ns == {name: prefill_ns(WORK, LATENCY, residents, name, tokens) for name in STRATEGIES}


def test_the_cpu_alone_takes_what_the_latencies_say() -> None:
    one = Workload(np.ones((3, 1)), 1, SIZE, 7.0, 1.0, 11.0)
    residents = one.residents(3)
    found = pass_ns(one, LATENCY, residents, "CPU only", 5, seed=0)
    assert found == pytest.approx(11 + 3 * (7 + 5 + LATENCY.cpu_ns(5)))
    assert pass_ns(one, LATENCY, residents, "planner", 5, 0) == pytest.approx(11 + 3 * (12 + LATENCY.device_ns(5)))
    assert decode_ns(one, LATENCY, residents, "CPU only", 5, steps=3) == pytest.approx(found)


def test_a_simulated_device_has_a_memory() -> None:
    expert, _ = expert_of(96, 64, ("q4g32",) * 3)
    device = SimulatedDevice(LATENCY, 15_000)
    device.keep(expert)
    assert 0 < device.used_bytes <= 15_000
    with pytest.raises(MemoryBudgetExceeded, match="simulated device has 15000 bytes"):
        device.keep(expert)
    device.close()
    assert device.used_bytes == 0
