"""A plan for a device: the floor of its memory, the recommended cache, the cost of a byte, and probes with noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.preflight.device_fit import choose_objective, fixed_memory, summarise_device
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.request.targets import SIZE_SHARE, byte_weights, reads_decide
from moec.compiler.request.uniform import uniform_plan
from moec.compiler.search.knapsack import least_cost
from moec.manifests.errors import DoesNotFit
from moec.manifests.quant import QuantSpec
from moec.manifests.sizes import option_bytes
from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from tests.compiler.lowered import lowered
from tests.compiler.search.toy_search import BF16, toy_model, toy_space
from tests.tiny_switch import save_tiny_switch

MODEL = toy_model(layers=4, experts=8, hidden=512, width=1024, vocab=32_000)
PI = load_profile("raspberry-pi-4b-sd")


def uniform(bits: int, dense_bits: int = 16) -> CompilePlan:
    experts = BF16 if bits == 16 else QuantSpec(bits, 64)
    dense = BF16 if dense_bits == 16 else QuantSpec(dense_bits, experts.group_size)
    return uniform_plan(MODEL, experts, dense, "bfloat16")


def with_budget(size_bytes: int) -> DeviceProfile:
    return replace(PI, memory_budget_bytes=size_bytes)


def floor_of(plan: CompilePlan) -> int:
    """Return the number in the refusal, which is rounded up to MiB."""
    with pytest.raises(DoesNotFit) as caught:
        summarise_device(with_budget(1 << 20), plan)
    floor = fixed_memory(plan, 0).floor_bytes
    told = f"a memory budget of {1 << 20} bytes, this model needs {floor} ({option_bytes(floor)}: "
    assert told in caught.value.message
    assert "raspberry" in caught.value.message and "--dense-bits" in str(caught.value.hint)
    return floor


def test_the_floor_is_where_refusal_ends() -> None:
    plan = uniform(4)
    floor = floor_of(plan)
    with pytest.raises(DoesNotFit, match=option_bytes(floor)):
        summarise_device(with_budget(floor - 1), plan)
    summary = summarise_device(with_budget(floor), plan)
    largest = plan.expert_padded_bytes(MODEL.expert_keys()[0])
    assert summary.memory_budget_bytes == floor
    assert summary.recommended_cache_bytes == MODEL.layers[0].experts.top_k * largest


def test_a_tokenizer_counts() -> None:
    assert fixed_memory(uniform(4), 1000).floor_bytes == fixed_memory(uniform(4), 0).floor_bytes + 13_000


def test_the_recommended_cache_grows_to_all_experts_and_no_further() -> None:
    plan = uniform(4)
    floor = floor_of(plan)
    total = sum(plan.expert_padded_bytes(key) for key in MODEL.expert_keys())
    more = summarise_device(with_budget(floor + 1_000_000), plan).recommended_cache_bytes
    assert more == summarise_device(with_budget(floor), plan).recommended_cache_bytes + 1_000_000
    assert summarise_device(PI, plan).recommended_cache_bytes == total


def test_a_budget_for_small_formats_alone_still_gets_an_objective() -> None:
    """The objective is computed with 8-bit experts and 16-bit dense weights. They need not fit if the plan does."""
    small, plain = uniform(2, dense_bits=4), plain_plan(MODEL, BF16, "gptq")
    tight = with_budget(floor_of(small))
    assert floor_of(small) < floor_of(uniform(8))
    assert choose_objective(tight, None, plain, None)
    assert summarise_device(tight, small).memory_budget_bytes == floor_of(small)


def test_a_probed_host_writes_none_of_its_numbers() -> None:
    """Two probes of one machine differ by a fifth. Bundle and objective are equal."""
    host = replace(
        PI, name="host", is_probed=True, memory_budget_bytes=2_050_000_000, memory_bytes_per_s=9_000_000_000,
        storage_bytes_per_s=450_000_000,
    )  # fmt: skip
    again = replace(
        host, memory_budget_bytes=2_090_000_000, memory_bytes_per_s=7_300_000_000, storage_bytes_per_s=550_000_000
    )
    summaries = [summarise_device(profile, uniform(4)) for profile in (host, again)]
    assert summaries[0] == summaries[1]
    assert (summaries[0].memory_budget_bytes, summaries[0].recommended_cache_bytes) == (0, 0)


def test_a_probed_hosts_noise_does_not_turn_the_objective() -> None:
    """If compute and storage take similar times, `tpot` compares rounded rates. Both probes then give one result."""
    large = toy_model(layers=6, experts=16, hidden=2048, width=3744)
    plain = plain_plan(large, BF16, "gptq")
    host = replace(
        PI, name="host", is_probed=True, memory_budget_bytes=1_500_000_000, memory_bytes_per_s=8_590_000_000,
        storage_bytes_per_s=4_290_000_000,
    )  # fmt: skip
    even = np.full((6, 16), 10, np.uint32)
    memory, storage = host.rounded().memory_bytes_per_s, host.rounded().storage_bytes_per_s
    answers = set()
    for up, down in ((0.75, 1.3), (1.3, 0.75), (1.0, 1.0)):
        noisy = replace(host, memory_bytes_per_s=int(memory * up), storage_bytes_per_s=int(storage * down))
        assert (noisy.rounded().memory_bytes_per_s, noisy.rounded().storage_bytes_per_s) == (memory, storage)
        answers |= {choose_objective(noisy, "tpot", plain, even)}
    assert len(answers) == 1


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


def test_bytes_of_an_encoder_are_paid_once(tmp_path: Path) -> None:
    model = lowered(save_tiny_switch(tmp_path / "model")).model
    popularity = np.zeros((model.num_layers, 4), np.uint32)
    popularity[list(model.expert_layers)] = [9, 1, 0, 0]
    weights = byte_weights(model, popularity, reads=True).experts
    assert weights[1].tolist() == weights[3].tolist() == [1, 1, 1, 1]
    assert weights[5, 0] > weights[5, 1] > weights[5, 2]
