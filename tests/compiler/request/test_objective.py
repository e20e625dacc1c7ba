"""The cost of a byte, and two plans of one model for two devices."""

from __future__ import annotations

import numpy as np
import pytest

from moec.compiler.preflight.device_fit import choose_objective
from moec.compiler.request.plan import plain_plan
from moec.compiler.request.targets import SIZE_SHARE, byte_weights, reads_decide
from moec.compiler.search.knapsack import least_cost
from moec.profiles.loading import load_profile
from tests.compiler.search.toy_search import BF16, toy_model, toy_space

# 2.2 GB at 8 bits: more than a Raspberry Pi has for experts, less than a Jetson.
LARGE = toy_model(layers=6, experts=16, hidden=2048, width=3744, vocab=320)
SKEWED = np.tile(np.array([1000, *[40] * 14, 0], np.uint32), (6, 1))


def test_plain_size_and_reads() -> None:
    model = toy_model()
    popularity = np.array([[30, 10, 0, 0], [0, 0, 0, 0]], np.uint32)
    assert np.all(byte_weights(model, popularity, reads=False).experts == 1)
    assert np.all(byte_weights(model, None, reads=True).experts == 1)
    weights = byte_weights(model, popularity, reads=True).experts
    assert weights[0] == pytest.approx([0.9 * 3 + SIZE_SHARE, 0.9 + SIZE_SHARE, SIZE_SHARE, SIZE_SHARE])
    assert weights[0].mean() == pytest.approx(1.0)
    assert np.all(weights > 0), "an expert that calibration never saw must not grow without bound"


@pytest.mark.parametrize(
    ("objective", "missed_bytes", "expected"),
    [("size", 1e9, False), ("bytes-per-token", 0, True), ("tpot", 1e9, True), ("tpot", 1e5, False)],
)
def test_reads_decide(objective: str, missed_bytes: float, expected: bool) -> None:
    assert reads_decide(objective, 1e6, missed_bytes, 1e9) is expected  # type: ignore[arg-type]


def test_two_devices_make_two_plans_of_the_same_model() -> None:
    plain = plain_plan(LARGE, BF16, "gptq")
    plans = {}
    for name, reads in (("raspberry-pi-4b-sd", True), ("jetson-tx2-ssd", False)):
        profile = load_profile(name)
        assert choose_objective(profile, None, plain, SKEWED) is reads
        space = toy_space(LARGE, byte_weights(LARGE, SKEWED, reads))
        plans[name] = space.plan(least_cost(space.table, 0.05))
    pi, jetson = plans["raspberry-pi-4b-sd"], plans["jetson-tx2-ssd"]
    assert pi.units != jetson.units

    def mean_bits(plan: object, expert: int) -> float:
        units = plan.units  # type: ignore[attr-defined]
        return float(np.mean([spec.bitwidth for unit, spec in units.items() if unit.expert == expert]))

    # If reads decide, an expert that is always read gets fewer bits, and one that is never read gets more.
    assert mean_bits(pi, 0) < mean_bits(jetson, 0)
    assert mean_bits(pi, 15) > mean_bits(jetson, 15)
    assert pi.expert_packed_bytes > jetson.expert_packed_bytes


def test_an_objective_that_is_asked_for_wins() -> None:
    plain = plain_plan(LARGE, BF16, "gptq")
    for name in ("raspberry-pi-4b-sd", "jetson-tx2-ssd"):
        profile = load_profile(name)
        assert choose_objective(profile, "bytes-per-token", plain, SKEWED)
        assert not choose_objective(profile, "size", plain, SKEWED)
