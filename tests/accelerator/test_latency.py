"""Latencies: lines through measured times, and a device whose constants are known measured back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime import kernels
from moec.runtime.accelerator.image import expert_bytes
from moec.runtime.accelerator.latency import SAMPLE_TOKENS, LatencyModel, fit_line, mean_latency, measure_latency
from moec.runtime.accelerator.torch_device import TorchDevice
from moec.runtime.simulation.accelerator_replay import SimulatedDevice
from tests.kernels.products import expert_of

TRUE = LatencyModel(4000.0, 900.0, 7000.0, 30.0, 2.0, 5.0, 3000.0, 11000.0)


@given(st.floats(1, 1e9), st.floats(0, 1e7))
def test_a_line_is_found(fixed: float, slope: float) -> None:
    found = fit_line(SAMPLE_TOKENS, [fixed + slope * tokens for tokens in SAMPLE_TOKENS])
    assert found == pytest.approx((fixed, slope), rel=1e-4, abs=1e-4 * (fixed + slope))


@given(st.lists(st.floats(1, 1e9), min_size=3, max_size=3))
def test_no_constant_is_negative_whatever_was_measured(times_ns: list[float]) -> None:
    fixed, slope = fit_line(SAMPLE_TOKENS, times_ns)
    assert fixed >= 0 and slope >= 0 and fixed + slope > 0


def test_the_time_of_one_token_counts_as_much_as_that_of_many() -> None:
    """Relative errors: a line by absolute ones would pass one token by."""
    fixed, slope = fit_line((1, 8, 32), (100.0, 160.0, 4000.0))
    assert fixed + slope == pytest.approx(100, rel=0.5)


@pytest.mark.parametrize(
    ("tokens", "times_ns"), [((1, 1), (2.0, 2.0)), ((1, 2), (0.0, 1.0)), ((1,), (1.0,)), ((1, 2), (1.0,))]
)
def test_too_little_for_a_line_is_refused(tokens: tuple[int, ...], times_ns: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive times of two"):
        fit_line(tokens, times_ns)


def test_a_device_of_known_latencies_is_measured_back() -> None:
    device = SimulatedDevice(TRUE, 1 << 30)
    expert, _ = expert_of(96, 64, ("q4g32",) * 3)

    def on_cpu(expert: kernels.Expert, x: np.ndarray, *rest: np.ndarray) -> None:
        device.advance(TRUE.cpu_ns(len(x)))

    found = measure_latency(device, expert, device.clock_ns, on_cpu)
    assert found.to_plain() == pytest.approx(TRUE.to_plain(), rel=1e-6)


def test_a_real_device_is_measured(device: torch.device) -> None:
    expert, _ = expert_of(96, 64, ("q4g32",) * 3)
    found = measure_latency(TorchDevice("test", device, 0, expert_bytes(expert)), expert)
    assert all(value >= 0 for value in found.to_plain().values())
    assert found.cpu_ns(1) > 0 and found.device_ns(1) > 0 and found.transfer_ns(1000) > 0
    assert "us a token" in found.to_text() and "GB/s" in found.to_text()
    assert LatencyModel(1, 1, 1, 1, 0.25, 0.5).to_text().endswith("copies 1.33 GB/s (link 2.00)")


def test_several_experts_make_a_mean() -> None:
    other = LatencyModel(0, 100, 1000, 10, 0, 1, 500, 1000)
    assert mean_latency([TRUE, other]) == LatencyModel(2000, 500, 4000, 20, 1, 3, 1750, 6000)
