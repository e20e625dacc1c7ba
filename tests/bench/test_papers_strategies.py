"""Simulated runtimes of bench/papers: their times follow from stated rates and from recorded requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.papers.edgemoe.counted import joules, packages
from bench.papers.hobbit.systems import quotients, shortened, span
from bench.papers.mobile.rivals import less_than, skipping
from bench.papers.twiddler.strategies import (
    COPIED,
    PLACED,
    PROFILE,
    RESIDENTS,
    TWIDDLER,
    Costs,
    expert_latency,
    workload,
)
from moec.profiles.loading import load_profile
from moec.runtime.options.lossy import parse_dynamic_precision
from moec.runtime.trace.trace import Trace, TracedPass, TraceHeader

EXPERT_BYTES = 2 * 3 * 4096 * 14336
COUNTS = np.array([[5, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 5]])


def costs(strategy: str) -> Costs:
    """Return Mixtral's costs on the profile, with popularity of two layers."""
    profile = load_profile(PROFILE)
    work = workload(COUNTS, profile.memory_bytes_per_s, 1e12)
    return Costs(work, expert_latency(profile), work.residents(RESIDENTS), strategy)


def test_an_expert_takes_its_bytes_over_the_rates_of_the_profile() -> None:
    profile = load_profile(PROFILE)
    latency, gpu = expert_latency(profile), profile.gpu
    assert gpu is not None and gpu.link_bytes_per_s
    assert latency.cpu_ns(0) == pytest.approx(1e9 * EXPERT_BYTES / profile.memory_bytes_per_s)
    assert latency.device_ns(0) == pytest.approx(1e9 * EXPERT_BYTES / gpu.memory_bytes_per_s)
    assert latency.transfer_ns(EXPERT_BYTES) == pytest.approx(1e9 * EXPERT_BYTES / gpu.link_bytes_per_s)


def test_a_profile_without_a_gpu_has_no_such_times() -> None:
    with pytest.raises(ValueError, match="expected a GPU with a link"):
        expert_latency(load_profile("raspberry-pi-4b-sd"))


def test_popularity_of_few_layers_is_repeated() -> None:
    work = workload(COUNTS, 1e11, 1e12)
    assert work.popularity.shape == (32, 8)
    assert work.popularity[2].tolist() == COUNTS[0].tolist() and work.popularity[31].tolist() == COUNTS[1].tolist()
    assert work.residents(RESIDENTS).sum() == RESIDENTS


def test_the_published_rule_copies_for_long_prompts_and_not_for_single_tokens() -> None:
    times = {name: costs(name).prefill_s(2048) for name in (TWIDDLER, PLACED, COPIED)}
    assert times[TWIDDLER] == pytest.approx(times[COPIED], rel=0.05) and times[TWIDDLER] < times[PLACED]
    rates = {name: costs(name).generated_per_s(16, 64) for name in (TWIDDLER, PLACED, COPIED)}
    assert rates[TWIDDLER] == pytest.approx(rates[PLACED], rel=0.02) and rates[TWIDDLER] > 2 * rates[COPIED]


def test_a_shorter_output_keeps_the_prompt_and_the_first_tokens() -> None:
    prompt, token = (TracedPass(n, ((0,),), ((),), (0,), (0,), (0,), 0, 0, 0) for n in (5, 1))
    header = TraceHeader("0" * 64, (8,), (1,), 5, "off", 1, 0, 0, 0)
    trace = Trace(header, (prompt, *[replace(token, elapsed_ns=at) for at in range(9)]))
    assert [each.elapsed_ns for each in shortened(trace, 4).passes[trace.prompt_passes :]] == [0, 1, 2]


def test_quotients_and_their_span() -> None:
    assert span(quotients([3.0, 1.0], [2.0, 2.0])) == "0.50 to 1.50"
    assert less_than([1, 2], [2, 3]) and not less_than([1, 3], [2, 3])


def test_skipping_never_takes_a_low_version() -> None:
    ((name, text),) = skipping(0.7)
    assert name == "dynamic_precision" and not parse_dynamic_precision(text).needs_low_versions


def write_zone(folder: Path, name: str, energy_uj: int | None) -> Path:
    """Write a folder as the kernel has one for an energy counter."""
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text("999\n")
    if energy_uj is not None:
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder


def test_energy_is_that_of_all_packages_also_if_a_count_starts_again(tmp_path: Path) -> None:
    first, second = (write_zone(tmp_path / f"intel-rapl:{at}", f"package-{at}", 900) for at in range(2))
    write_zone(tmp_path / "intel-rapl:0:0", "core", 5)
    write_zone(tmp_path / "intel-rapl:2", "package-2", None)
    found = packages(tmp_path)
    assert [zone.folder for zone in found] == [first, second]

    def run() -> None:
        (first / "energy_uj").write_text("950\n")
        (second / "energy_uj").write_text("100\n")

    assert joules(run, found) == pytest.approx((50 + 200) / 1e6)
    assert packages(tmp_path / "nothing") == []
