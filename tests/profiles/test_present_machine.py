"""Whether this machine is the device of a profile, by the facts of a made-up root folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moec.profiles.device import DeviceProfile
from moec.profiles.device_parts import Cores
from moec.profiles.loading import load_profile
from moec.profiles.probe import first_difference, slower_kernels


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Raspberry Pi 5 with 8 GB."""
    monkeypatch.setattr("moec.profiles.probe.allowed_processors", lambda: set(range(4)))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8245000 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("Features\t: fp asimd asimddp\n")
    return tmp_path


@pytest.fixture
def profile() -> DeviceProfile:
    return load_profile("raspberry-pi-5-nvme")


def test_such_a_device(system: Path, profile: DeviceProfile) -> None:
    assert first_difference(profile, system) is None


def test_a_profile_that_leaves_cores_to_reading_fits_all_of_them(system: Path, profile: DeviceProfile) -> None:
    sources = {**profile.provenance, "cores.big": "estimate", "cores.little": "estimate"}
    some = replace(profile, threads=3, cores=Cores(2, 2), provenance=sources)
    assert first_difference(some, system) is None
    assert first_difference(replace(some, cores=Cores(2, 3)), system) == "it has 4 threads, the profile 3"
    assert first_difference(replace(some, threads=4), system) is None


def test_other_threads(system: Path, profile: DeviceProfile) -> None:
    assert first_difference(replace(profile, threads=8), system) == "it has 4 threads, the profile 8"


@pytest.mark.parametrize(
    ("siblings", "threads", "told"),
    [
        (["0-1", "0-1", "2-3", "2-3"], 2, None),
        (["0-1", "0-1", "2-3", "2-3"], 4, None),
        (["0-1", "0-1", "2-3", "2-3"], 3, "it has 4 threads on 2 cores, the profile 3"),
        (["0,2", "1,3", "0,2", "1,3"], 2, None),
        (["0-1", "0-1"], 1, "it has 4 threads, the profile 1"),
    ],
)
def test_a_profile_may_count_cores_of_two_threads_once(
    system: Path, profile: DeviceProfile, siblings: list[str], threads: int, told: str | None
) -> None:
    for number, text in enumerate(siblings):
        place = system / f"sys/devices/system/cpu/cpu{number}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(text + "\n")
    assert first_difference(replace(profile, threads=threads), system) == told


def test_another_instruction_set(system: Path, profile: DeviceProfile) -> None:
    (system / "proc/cpuinfo").write_text("Features\t: fp asimd\n")
    assert first_difference(profile, system) == "its best instruction set is neon, that of the profile neon-dot"


def test_less_memory_than_the_budget(system: Path, profile: DeviceProfile) -> None:
    (system / "proc/meminfo").write_text("MemTotal:  4000000 kB\n")
    assert first_difference(profile, system) == "it has 3906MiB of memory, the budget of the profile is 6675MiB"


def test_unknown_memory(system: Path, profile: DeviceProfile) -> None:
    (system / "proc/meminfo").unlink()
    assert first_difference(profile, system) == "it does not tell how much memory it has"


@pytest.mark.parametrize(
    ("assumed", "cpuinfo", "is_slower"),
    [
        ("neon-dot", "Features\t: fp asimd\n", True),
        ("neon-dot", "Features\t: fp asimd asimddp i8mm\n", False),
        ("neon", "Features\t: fp\n", True),
        ("neon-dot", "flags\t: avx2 fma f16c\n", False),
        ("avx512vnni", "flags\t: avx2 fma f16c\n", True),
        ("avx2", "flags\t: avx2 fma f16c avx_vnni\n", False),
        ("avx2", "", True),
        ("scalar", "flags\t: avx2 fma f16c\n", False),
    ],
)
def test_a_processor_without_the_assumed_set(
    assumed: str, cpuinfo: str, is_slower: bool, system: Path, profile: DeviceProfile
) -> None:
    (system / "proc/cpuinfo").write_text(cpuinfo)
    told = slower_kernels(replace(profile, instruction_sets=(assumed,)), system)
    words = f"its predicted speed assumes {assumed}, which this processor lacks, so a run is slower"
    assert told == (words if is_slower else None)
