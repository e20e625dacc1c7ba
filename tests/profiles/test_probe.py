"""The probe of the present machine, and its readings of /proc and /sys from a made-up root."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import ProfileError
from moec.profiles import probe
from moec.profiles.device_parts import Cores
from moec.profiles.loading import load_profile
from moec.profiles.processor import core_kinds, little_processors

FLAGS = "flags\t\t: fpu sse2 fma f16c avx avx2"


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    root = tmp_path / "system"
    put(root, "proc/meminfo", "MemTotal:  1000000 kB\nMemFree: 10 kB\n")
    put(root, "proc/cpuinfo", f"processor: 0\n{FLAGS}\n")
    return root


def test_the_whole_probe_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
    start = time.process_time()
    profile = load_profile("host", storage=tmp_path)
    # Two seconds is the promise on a quiet machine with two processors; other work does not lengthen processor time.
    assert time.process_time() - start < 6
    assert list(tmp_path.iterdir()) == []
    assert profile.name == "host"
    assert profile.is_probed
    assert profile.instruction_sets[-1] == "scalar"
    assert all(text.startswith("measured: ") for text in profile.provenance.values())


def test_two_probes_have_one_digest(tmp_path: Path) -> None:
    assert len({probe.probe_host(tmp_path).sha256 for _ in range(2)}) == 1


def test_an_existing_file_is_read_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(probe.MIN_SAMPLE_BYTES))
    before = path.stat().st_mtime_ns
    assert probe.measure_storage(path).bytes_per_s > 0
    assert path.stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


def test_requests_are_as_large_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes, really_read = tmp_path / "model.safetensors", list[int](), os.preadv
    path.write_bytes(os.urandom(probe.MIN_SAMPLE_BYTES))

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        sizes.append(len(buffers[0]))
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    figures = probe.measure_storage(path, 1_000_000)
    assert figures.request_bytes == max(sizes) == -(-1_000_000 // figures.block_bytes) * figures.block_bytes
    sizes.clear()
    assert probe.measure_storage(path, 1 << 30).request_bytes == max(sizes) == probe.MIN_SAMPLE_BYTES // 4


def test_a_device_that_makes_some_reads_wait_is_not_judged_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really_read = tmp_path / "model.safetensors", os.preadv
    path.write_bytes(os.urandom(probe.MIN_SAMPLE_BYTES))

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        if len(buffers[0]) == 1 << 20 and offset >> 20 & 2:  # every other read of each reader
            time.sleep(0.05)
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    assert probe.measure_storage(path, 1 << 20).bytes_per_s < probe.MIN_SAMPLE_BYTES / 0.1


def test_a_file_system_without_direct_reads_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def no_direct(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", no_direct)
    figures = probe.measure_storage(tmp_path)
    assert not figures.is_direct
    assert figures.bytes_per_s > 0


def test_a_descriptor_that_refuses_direct_reads_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_read, calls = os.preadv, []

    def refuse_once(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_once)
    assert not probe.measure_storage(tmp_path).is_direct


def test_a_place_that_cannot_be_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="absent") as caught:
        probe.measure_storage(tmp_path / "absent" / "deep")
    assert caught.value.hint


def test_memory_is_the_physical_memory_without_a_limit(system: Path) -> None:
    assert probe.memory_limit_bytes(system) == 1_024_000_000


def test_memory_is_bounded_by_control_groups(system: Path) -> None:
    put(system, "proc/self/cgroup", "0::/a\n")
    put(system, "sys/fs/cgroup/a/memory.max", "5000\n")
    assert probe.memory_limit_bytes(system) == 5000


def test_a_machine_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="meminfo"):
        probe.memory_limit_bytes(tmp_path)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (FLAGS, ("avx2", "scalar")),
        (FLAGS + " avx512f avx512bw avx512vl avx512_vnni", ("avx512vnni", "avx2", "scalar")),
        (FLAGS + " avx512f avx512bw avx512vl avx512_vnni amx_tile amx_int8", ("amx", "avx512vnni", "avx2", "scalar")),
        (FLAGS + " avx_vnni", ("avxvnni", "avx2", "scalar")),
        ("flags : fpu sse2 avx2", ("scalar",)),
        ("Features : fp asimd asimddp i8mm", ("neon-i8mm", "neon-dot", "neon", "scalar")),
        ("Features : fp asimd evtstrm asimddp", ("neon-dot", "neon", "scalar")),
        ("Features : fp asimd evtstrm", ("neon", "scalar")),
        ("", ("scalar",)),
    ],
)
def test_instruction_sets(system: Path, cpuinfo: str, expected: tuple[str, ...]) -> None:
    put(system, "proc/cpuinfo", cpuinfo)
    assert probe.instruction_sets(system) == expected


CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        (["446", "446", "1024"], ((1, 2, (0, 1)), "cpu_capacity")),
        (["1024", "900", "400"], ((1, 2, (1, 2)), "cpu_capacity")),
        (["1024", "1024", "1024"], None),
        (["446", "", "1024"], None),
        (["446", "many", "1024"], None),
        (["446", "9" * 5000, "1024"], None),
    ],
)
def test_arm_processors_of_less_capacity_are_little(
    system: Path, capacities: list[str], expected: tuple[tuple[int, int, tuple[int, ...]], str] | None
) -> None:
    for number, text in enumerate(capacities):
        put(system, f"{CPU}/cpu{number}/cpu_capacity", text + "\n")
    found = core_kinds(range(3), system)
    assert (found and ((found[0].big, found[0].little, found[0].little_cpus), found[1])) == expected


@pytest.mark.parametrize(
    ("atoms", "little"),
    [
        ("4-7\n", (4, 5, 6, 7)),
        ("4,6-7\n", (4, 6, 7)),
        ("", ()),
        ("x\n", ()),
        ("4-x\n", ()),
        (f"4-{10**9 - 1}\n", (4, 5, 6, 7)),
    ],
)
def test_hybrid_x86_processors_are_listed_by_kind(system: Path, atoms: str, little: tuple[int, ...]) -> None:
    put(system, "sys/devices/cpu_core/cpus", "0-3\n")
    put(system, "sys/devices/cpu_atom/cpus", atoms)
    found = core_kinds(range(8), system)
    assert (() if found is None else found[0].little_cpus) == little


def test_processors_that_this_process_may_not_use_are_not_counted(system: Path) -> None:
    put(system, "sys/devices/cpu_core/cpus", "0-3\n")
    put(system, "sys/devices/cpu_atom/cpus", "4-7\n")
    found = core_kinds({2, 3, 7}, system)
    assert found is not None and (found[0].big, found[0].little, found[0].little_cpus) == (2, 1, (7,))
    assert core_kinds({2, 3}, system) is None


@pytest.mark.parametrize(
    ("capacities", "little", "found"),
    [
        (["300", "300", "900", "1024"], 2, (0, 1)),
        (["1024", "900", "300", "300"], 2, (2, 3)),
        (["300", "300", "900", "1024"], 3, (0, 1, 2)),
        (["300", "900", "900", "1024"], 2, ()),  # which of two equal ones?
        (["1024", "1024", "1024", "1024"], 2, ()),
        (["300", "300", "900", "1024"], 4, ()),
        (["300", "", "900", "1024"], 2, (1, 3)),  # not all are stated: the numbers of the profile
    ],
)
def test_little_processors_of_a_profile_are_those_of_the_least_capacity(
    system: Path, capacities: list[str], little: int, found: tuple[int, ...]
) -> None:
    for number, text in enumerate(capacities):
        put(system, f"{CPU}/cpu{number}/cpu_capacity", text + "\n")
    stated = Cores(1, little, (1, 3) if little == 2 else ())
    assert little_processors(stated, {0, 1, 2, 3}, system) == found


def test_little_processors_of_a_hybrid_are_its_own(system: Path) -> None:
    put(system, "sys/devices/cpu_core/cpus", "0-1\n")
    put(system, "sys/devices/cpu_atom/cpus", "2-5\n")
    assert little_processors(Cores(2, 2, (0, 1)), {0, 1, 2, 3}, system) == (2, 3)


def test_stated_little_processors_must_be_at_hand(system: Path) -> None:
    stated = Cores(2, 2, (1, 0))
    assert little_processors(stated, {0, 1, 2}, system) == (0, 1)
    assert little_processors(stated, {1, 2, 3}, system) == () == little_processors(Cores(2, 2), {0, 1}, system)


def test_the_probe_tells_the_kinds_of_cores(system: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "allowed_processors", lambda: {0, 1, 2})
    monkeypatch.setattr(probe, "measure_memory", lambda size: 9)
    monkeypatch.setattr(probe, "measure_storage", lambda *_: probe.StorageFigures(1, 1, 1, 4096, True))
    for number, text in enumerate(["446", "446", "1024"]):
        put(system, f"{CPU}/cpu{number}/cpu_capacity", text + "\n")
    profile = probe.probe_host(tmp_path, system)
    assert profile.threads == 3 and profile.cores is not None and profile.cores.little_cpus == (0, 1)
    assert profile.gpu is None and profile.power is None, "what is not measured is not stated"
    assert profile.provenance["cores.little_cpus"] == "measured: cpu_capacity of the system"


def test_last_level_cache(system: Path) -> None:
    assert probe.last_level_cache_bytes(system) == 0
    cache = "sys/devices/system/cpu/cpu0/cache"
    for index, text in enumerate(["32K", "1M", "odd", "77"]):
        put(system, f"{cache}/index{index}/size", text + "\n")
    assert probe.last_level_cache_bytes(system) == 1 << 20


def test_threads_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.available_threads() >= 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert probe.available_threads() == 1


@pytest.mark.parametrize("size", [0, 100, 4096, 70_000])
def test_a_small_file_is_read_itself_where_none_may_be_made(tmp_path: Path, size: int) -> None:
    file = tmp_path / "small"
    file.write_bytes(bytes(size))
    tmp_path.chmod(0o500)
    try:
        figures = probe.measure_storage(file, least_bytes=0)
    finally:
        tmp_path.chmod(0o700)
    assert figures.bytes_per_s > 0 and [path.name for path in tmp_path.iterdir()] == ["small"]
