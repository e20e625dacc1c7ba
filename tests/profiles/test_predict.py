"""Predictions of a profile for a bundle: time per token, cache, refusal, objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import DoesNotFit
from moec.manifests.sizes import option_bytes
from moec.profiles.device import DeviceProfile
from moec.profiles.device_parts import Power
from moec.profiles.loading import load_profile
from moec.profiles.memory_floor import PROCESS_BYTES, FixedMemory
from moec.profiles.predict import (
    compute_ns,
    default_objective,
    expected_misses,
    predicted_joules,
    predicted_tpot_ns,
    recommended_cache_bytes,
    storage_ns,
)

PI = load_profile("raspberry-pi-4b-sd")
TX2 = load_profile("jetson-tx2-ssd")


def small(**changes: object) -> DeviceProfile:
    figures = {
        "memory_bytes_per_s": 1_000_000_000,
        "storage_bytes_per_s": 100_000_000,
        "storage_latency_ns": 1000,
        "memory_budget_bytes": PROCESS_BYTES + 1000,
    }
    return replace(PI, **{**figures, **changes})


def test_a_token_takes_the_longer_of_compute_and_storage() -> None:
    assert compute_ns(small(), 500) == 500
    assert storage_ns(small(), 100, 2) == 1000 + 2000
    assert predicted_tpot_ns(small(), 500, 100, 2) == 3000
    assert predicted_tpot_ns(small(), 5000, 100, 2) == 5000
    assert predicted_tpot_ns(small(), 0, 0, 0) == 0


def test_times_are_rounded_up() -> None:
    assert storage_ns(small(storage_bytes_per_s=3_000_000_000), 1, 0) == 1


SIZES = st.integers(0, 1 << 40)


@given(SIZES, SIZES, st.floats(0, 1e6), st.integers(1, 100))
def test_a_faster_device_never_predicts_slower(compute: int, missed: int, reads: float, factor: int) -> None:
    faster = replace(
        TX2, memory_bytes_per_s=TX2.memory_bytes_per_s * factor, storage_bytes_per_s=TX2.storage_bytes_per_s * factor
    )
    assert predicted_tpot_ns(faster, compute, missed, reads) <= predicted_tpot_ns(TX2, compute, missed, reads)


def test_misses_of_a_cache_that_keeps_the_most_read() -> None:
    experts = [(100, 0.5), (100, 1.0), (50, 0.25)]
    assert expected_misses(experts, 0) == (100 * 0.5 + 100 + 50 * 0.25, 1.75)
    assert expected_misses(experts, 100) == (100 * 0.5 + 50 * 0.25, 0.75)
    assert expected_misses(experts, 150) == (50.0, 0.5)
    assert expected_misses(experts, 250) == (0.0, 0.0)
    assert expected_misses([], 10) == (0.0, 0.0)


@given(st.lists(st.floats(0, 2), max_size=20), SIZES, SIZES)
def test_more_cache_never_misses_more(reads: list[float], cache: int, more: int) -> None:
    experts = [(1 << 30, rate) for rate in reads]
    assert expected_misses(experts, cache + more)[0] <= expected_misses(experts, cache)[0]


FIXED = FixedMemory(
    process_bytes=PROCESS_BYTES,
    dense_bytes=300,
    kv_bytes=200,
    scratch_bytes=90,
    tables_bytes=10,
    minimum_expert_bytes=50,
)


def test_the_cache_is_what_the_budget_leaves_and_at_most_all_experts() -> None:
    assert recommended_cache_bytes(small(), FIXED, 10_000) == 400
    assert recommended_cache_bytes(small(), FIXED, 120) == 120
    assert recommended_cache_bytes(small(), replace(FIXED, process_bytes=PROCESS_BYTES - 5), 10_000) == 405


def test_a_budget_at_the_floor_is_enough_and_one_byte_less_is_refused() -> None:
    floor = PROCESS_BYTES + 650
    enough = small(memory_budget_bytes=floor)
    assert recommended_cache_bytes(enough, FIXED, 10_000) == 50
    with pytest.raises(DoesNotFit) as caught:
        recommended_cache_bytes(small(memory_budget_bytes=floor - 1), FIXED, 10_000)
    assert f"this model needs {floor} ({option_bytes(floor)}: " in caught.value.message
    assert caught.value.hint


def test_objective_follows_from_what_decides_speed() -> None:
    assert default_objective(small(), 1000, 0, 0) == "size"
    assert default_objective(small(), 1000, 1000, 0) == "bytes-per-token"
    assert default_objective(small(), 1000, 400, 0) == "tpot"
    assert default_objective(small(), 1000, 401, 0) == "bytes-per-token"


def test_two_devices_have_two_objectives_for_one_model() -> None:
    """150 MB of arithmetic and 12 MB of misses per token: an SD card decides, a solid-state drive only half."""
    shape = (150_000_000, 12_000_000, 4.0)
    assert default_objective(PI, *shape) == "bytes-per-token"
    assert default_objective(TX2, *shape) == "tpot"


def test_a_probe_decides_from_rounded_figures() -> None:
    probe = small(is_probed=True)
    assert default_objective(probe, 1000, 1000, 0) == default_objective(probe.rounded(), 1000, 1000, 0)


def test_energy_is_the_stated_draw_times_the_predicted_time() -> None:
    assert predicted_joules(Power(6.0, 2.0), 5e8, 0.0, uses_gpu=False) == 3.0
    assert predicted_joules(Power(6.0, 2.0), 5e8, 1.0, uses_gpu=False) == 1.0
    assert predicted_joules(Power(6.0, 2.0), 1e9, 0.25, uses_gpu=False) == 5.0
    assert predicted_joules(Power(6.0), 1e9, 0.9, uses_gpu=False) == pytest.approx(6.0), "a draw that is not stated"
    assert predicted_joules(Power(6.0, gpu_watts=100), 1e9, 0.0, uses_gpu=True) == 106.0
    assert predicted_joules(Power(6.0, gpu_watts=100), 1e9, 0.0, uses_gpu=False) == 6.0
    assert predicted_joules(Power(6.0), 1e9, 0.0, uses_gpu=True) is None, "its GPU draws what nobody states"
    assert predicted_joules(Power(gpu_watts=100), 1e9, 0.0, uses_gpu=True) is None
