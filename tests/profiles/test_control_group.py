"""What control groups leave of memory and processors, and what freed memory counts against a limit."""

from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moec.cli.main import heed_quota
from moec.profiles import probe
from moec.profiles.control_group import group_free_memory, group_memory_limits, processor_quota
from moec.profiles.freed_memory import give_back_freed_memory
from tests.gates.memory_group import memory_group

MIB = 1 << 20
GROUP = "sys/fs/cgroup"
NO_LIMIT = "9223372036854771712"


def put(root: Path, files: dict[str, str]) -> Path:
    """Write files of a system and return its root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def in_tree(files: dict[str, str]) -> dict[str, str]:
    """Return files of control groups under their paths in the system."""
    return {f"{GROUP}/{name}": text for name, text in files.items()}


def mount(root: str, place: str, kind: str, options: str) -> str:
    """Return a line of /proc/self/mountinfo."""
    return f"31 23 0:28 {root} {place} rw,nosuid - {kind} cgroup {options}"


TREE = {
    "version 2": ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, 0.5),
    "version 2, of a parent": ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
    "version 2, the least": ("0::/a", {"a/cpu.max": "300000 100000", "cpu.max": "200000 100000"}, 2),
    "version 2, another period": ("0::/a", {"a/cpu.max": "2500 1000"}, 2.5),
    "no quota": ("0::/a", {"a/cpu.max": "max 100000"}, math.inf),
    "no control groups": ("", {}, math.inf),
    "version 1": ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
    "version 1, two controllers in one mount": (
        "4:cpu,cpuacct:/a",
        {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "25000"},
        2,
    ),
    "version 1, of the root of a container": (
        "4:cpu:/docker/12ab",
        {"cpu/cpu.cfs_quota_us": "70000", "cpu/cpu.cfs_period_us": "100000"},
        0.7,
    ),
    "version 1, no quota": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    "a hybrid": ("4:cpu:/a\n0::/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
    "another controller's group": ("4:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "50000"}, math.inf),
    "damaged files": ("0::/a\nodd", {"a/cpu.max": "9" * 5000, "cpu.max": "0 0"}, math.inf),
}


@pytest.mark.parametrize("name", TREE)
def test_quotas(tmp_path: Path, name: str) -> None:
    group, files, expected = TREE[name]
    assert processor_quota(put(tmp_path, {"proc/self/cgroup": group, **in_tree(files)})) == pytest.approx(expected)


MOUNTS = {
    "a group below the one that a container sees": (
        "4:memory:/docker/12ab/inner",
        mount("/docker/12ab", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
        "sys/fs/cgroup/memory/inner/memory.limit_in_bytes",
    ),
    "a container that sees only itself": (
        "4:memory:/docker/12ab",
        mount("/docker/12ab", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
    ),
    "another place, with a space": (
        "4:memory:/a",
        mount("/", r"/my\040groups/memory", "cgroup", "rw,memory"),
        "my groups/memory/a/memory.limit_in_bytes",
    ),
    "controllers mounted together": (
        "4:cpu,memory:/a",
        mount("/", "/cgroup", "cgroup", "rw,cpu,memory"),
        "cgroup/a/memory.limit_in_bytes",
    ),
    "version 2 next to version 1": (
        "4:cpu:/a\n0::/a",
        mount("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"),
        "sys/fs/cgroup/unified/a/memory.max",
    ),
    "a name of another container": (
        "0::/../other/x",
        mount("/", "/sys/fs/cgroup", "cgroup2", "rw"),
        "sys/fs/cgroup/memory.max",
    ),
}


@pytest.mark.parametrize("name", MOUNTS)
def test_groups_are_found_where_they_are_mounted(tmp_path: Path, name: str) -> None:
    group, mounts, file = MOUNTS[name]
    system = put(tmp_path, {"proc/self/cgroup": group, "proc/self/mountinfo": f"odd line\n{mounts}", file: "5000"})
    assert group_memory_limits(system) == [5000]


USE = {
    "version 2, file cache is free": (
        "0::/a",
        {"a/memory.max": "1000", "a/memory.current": "700", "a/memory.stat": "anon 400\ninactive_file 250"},
        [550],
    ),
    "version 2, of all levels": (
        "0::/a/b",
        {"a/b/memory.max": "1000", "a/b/memory.current": "100", "a/memory.max": "2000", "a/memory.current": "1900"},
        [900, 100],
    ),
    "version 2, a limit that slows down": (
        "0::/a",
        {"a/memory.max": "max", "a/memory.high": "600", "a/memory.current": "200"},
        [400],
    ),
    "version 1, file cache is free": (
        "4:memory:/a",
        {
            "memory/a/memory.limit_in_bytes": "1000",
            "memory/a/memory.usage_in_bytes": "700",
            "memory/a/memory.stat": "inactive_file 9\ntotal_inactive_file 250",
        },
        [550],
    ),
    "version 1, no limit": (
        "4:memory:/a",
        {"memory/a/memory.limit_in_bytes": NO_LIMIT, "memory/a/memory.usage_in_bytes": "700"},
        [],
    ),
    "use is not told": ("0::/a", {"a/memory.max": "1000"}, [990]),
    "more in use than the limit": ("0::/a", {"a/memory.max": "1000", "a/memory.current": "1200"}, [0]),
    "more file cache than use": (
        "0::/a",
        {"a/memory.max": "1000", "a/memory.current": "5", "a/memory.stat": "inactive_file 80"},
        [1000],
    ),
}


@pytest.mark.parametrize("name", USE)
def test_memory_that_groups_leave(tmp_path: Path, name: str) -> None:
    group, files, expected = USE[name]
    system = put(tmp_path, {"proc/self/cgroup": group, **in_tree(files)})
    assert group_free_memory(system, own_bytes=10) == expected


def test_free_memory_is_the_least_of_machine_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "resident_set_bytes", lambda: 50 * MIB)
    system = put(tmp_path, {"proc/meminfo": "MemTotal: 1024000 kB\nMemAvailable: 819200 kB"})
    assert probe.available_memory_bytes(system) == 800 * MIB
    limit = {f"{GROUP}/a/memory.max": str(900 * MIB), f"{GROUP}/a/memory.current": str(700 * MIB)}
    put(system, {"proc/self/cgroup": "0::/a", **limit})
    # The memory of this process is a part of what the group uses, so it is not subtracted again.
    assert probe.available_memory_bytes(system) == 200 * MIB
    put(system, {"proc/meminfo": "MemTotal: 102400 kB"})
    assert probe.available_memory_bytes(system) == 50 * MIB, "an old system tells its total alone"


def test_threads_follow_the_quota_and_the_identity_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "allowed_processors", lambda: {0, 1, 2, 3})
    system = put(tmp_path, {"proc/meminfo": "MemTotal: 1024000 kB", "proc/self/cgroup": "0::/"})
    machine, seen = probe.machine_sha256(system), list[int]()
    for quota in ("max 100000", "350000 100000", "100000 100000", "20000 100000", "900000 100000"):
        put(system, {f"{GROUP}/cpu.max": quota})
        seen.append(probe.available_threads(system))
        assert probe.machine_sha256(system) == machine
    assert seen == [4, 3, 1, 1, 4]


def test_other_libraries_start_no_more_threads_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One processor, a quota of two, four processors in the machine."""
    monkeypatch.setattr("moec.profiles.control_group.processor_quota", lambda: 2.0)
    monkeypatch.setattr(probe, "processor_quota", lambda system: 2.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for processors, threads in (({3}, "1"), ({0, 1, 2, 3}, "2")):
        monkeypatch.setattr(probe, "allowed_processors", lambda processors=processors: processors)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        heed_quota()
        assert os.environ.pop("OMP_NUM_THREADS") == threads
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        heed_quota()
        assert os.environ["OMP_NUM_THREADS"] == "7", "the user's word"


def test_a_sandbox_that_refuses_to_tell_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert probe.allowed_processors() == set(range(os.cpu_count() or 1))


CONTENTS = (
    *("", "max", "-1", "0", "1", "0 0", "1 0", "0 1", "-5 100000", "1e9 1", "nan nan", "max max max", " 5 ", "0x10"),
    *("9" * 18, "9" * 19, "9" * 5000, "9" * 18 + " 1", "1 " + "9" * 18, "50000,100000"),
    *("\u0665\u0665", "1\n2", "\0", "\x1b[2J"),
)
GROUPS = (
    *("0::/a", "0::/../..", "0::/a/./.", "0::" + "/a" * 3000, "0::/" + "a" * 300, "0::/a\0b", "0:", "::", ":::", "0::"),
    "0::a",
    *("1:name=systemd:/a\n0::/a", "4:cpu,memory:/a", "4:memory:/a\n5:cpu:/\udcff", "\n\n0::/a\n", "x" * 100_000),
)
HOSTILE_MOUNTS = ("", mount("/", "/sys/fs/cgroup", "cgroup2", "rw"), "31 - \0", mount("", "", "", ""))
LIMIT_FILES = (
    *("cpu.max", "memory.max", "memory.high", "memory.current", "memory.stat", "cpu/cpu.cfs_quota_us"),
    *("cpu/cpu.cfs_period_us", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def require_sound(system: Path) -> None:
    """Read everything about control groups. Whatever they hold, the machine's memory and a thread remain."""
    assert all(limit > 0 for limit in group_memory_limits(system)) and processor_quota(system) > 0
    assert all(free >= 0 for free in group_free_memory(system, 5 * MIB))
    assert 0 < probe.memory_limit_bytes(system) <= 1_024_000 * 1024
    assert 0 <= probe.available_memory_bytes(system) <= 1_024_000 * 1024
    assert 1 <= probe.available_threads(system) <= len(probe.allowed_processors())


@pytest.mark.gate("G10")
@pytest.mark.parametrize("content", CONTENTS, ids=[str(number) for number in range(len(CONTENTS))])
def test_hostile_contents_of_control_groups(tmp_path: Path, content: str) -> None:
    for group in ("0::/", "4:cpu,memory:/"):
        system = put(tmp_path, {"proc/meminfo": "MemTotal: 1024000 kB", "proc/self/cgroup": group})
        put(system, in_tree({name: content for name in LIMIT_FILES}))
        require_sound(system)
        for name in LIMIT_FILES:
            put(system, in_tree({other: content if other == name else "100 100" for other in LIMIT_FILES}))
            require_sound(system)


@pytest.mark.gate("G10")
@pytest.mark.parametrize("group", GROUPS, ids=[str(number) for number in range(len(GROUPS))])
@pytest.mark.parametrize(
    "mounts", ["", mount("/", "/sys/fs/cgroup", "cgroup2", "rw"), "31 - \0", mount("", "", "", "")]
)
def test_hostile_names_of_control_groups(tmp_path: Path, group: str, mounts: str) -> None:
    system = put(tmp_path, {"proc/meminfo": "MemTotal: 1024000 kB", "proc/self/mountinfo": mounts})
    (system / "proc/self/cgroup").write_bytes(group.encode("utf-8", "surrogateescape"))
    put(system, in_tree({"cpu.max": "50000 100000", "a/cpu.max": "50000 100000", "a/memory.max": "500000"}))
    require_sound(system)


@pytest.mark.gate("G10")
def test_files_of_control_groups_that_are_no_files(tmp_path: Path) -> None:
    system = put(tmp_path, {"proc/meminfo": "MemTotal: 1024000 kB", "proc/self/cgroup": "0::/a"})
    group = system / GROUP / "a"
    (group / "memory.max").mkdir(parents=True)
    (group / "cpu.max").symlink_to("cpu.max")
    (group / "memory.current").symlink_to("missing")
    require_sound(system)


HOLD = "import sys; held = bytearray(b'x') * (120 << 20); print('held', flush=True); sys.stdin.read()"
ASK = """
import json
from moec.profiles.probe import available_memory_bytes, available_threads, resident_set_bytes
print(json.dumps([available_memory_bytes(), available_threads(), resident_set_bytes()]))
"""


def inside(processes: Path, program: str) -> list[str]:
    """Return the command that runs a Python program in a control group."""
    enter = f"import os; open({str(processes)!r}, 'w').write(str(os.getpid()))\n"
    return [sys.executable, "-c", enter + program]


def asked(processes: Path) -> list[int]:
    done = subprocess.run(inside(processes, ASK), capture_output=True, text=True, timeout=60, check=True)
    values: list[int] = json.loads(done.stdout)
    return values


def test_what_others_of_a_real_group_use_is_not_free() -> None:
    with memory_group(256 * MIB) as group:
        holder = subprocess.Popen(
            inside(group.processes, HOLD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with holder:
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdout.readline()
            free, _, _ = asked(group.processes)
            holder.stdin.close()
        assert free <= (256 - 120) * MIB < asked(group.processes)[0] + 40 * MIB


@contextmanager
def quota_group(processors: float) -> Iterator[Path]:
    """Make a control group with a quota and yield its file of processes, or skip the test."""
    root = Path("/sys/fs/cgroup")
    is_version_2 = (root / "cgroup.controllers").exists()
    folder = (root if is_version_2 else root / "cpu") / f"moec-quota-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"NOT RUN: no control groups of processors here: {error}")
    try:
        try:
            if is_version_2:
                (folder / "cpu.max").write_text(f"{int(processors * 100_000)} 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(int(processors * 100_000)))
        except OSError as error:
            pytest.skip(f"NOT RUN: no quota of processors here: {error}")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def test_the_quota_of_a_real_group() -> None:
    with quota_group(1.5) as processes:
        assert asked(processes)[1] == 1


MATRIX = 1 << 22
"""16 MiB of float32."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_threads_have_freed_goes_back() -> None:
    stays: list[torch.Tensor] = []

    def work() -> None:
        torch.ones(2 * MATRIX - 4096)  # nearly 32 MiB: once it is freed, matrices come from the thread's heap
        for size in range(1, 13):
            freed = [torch.ones(MATRIX) for _ in range(3)]
            stays.append(torch.ones(1000 * size))
            del freed

    give_back_freed_memory()
    before = resident_bytes()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = resident_bytes() - before
    give_back_freed_memory()
    assert kept > 4 * 4 * MATRIX, "the allocator keeps nothing, and nothing is shown"
    assert resident_bytes() - before < 4 * MATRIX
    assert len(stays) == 24
