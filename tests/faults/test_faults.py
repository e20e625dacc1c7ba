"""The n-th call of a kind fails, around the commands that read and write bundles.

Exit code 0, 1, 3 or 75, no traceback; what existed is whole, no half result stands under a name, descriptors and
threads are given back, and the next run works. Each sweep here takes a few numbers spread over all. MOEC_FULL_GATES=1
takes every number, of a compile every twentieth.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moec.runtime.bundle.archive import pack_bundle
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fail_nth.c")
LIMIT_S = 3600
IS_FULL = os.environ.get("MOEC_FULL_GATES") == "1"
READS = ("read", "reads", "short-read", "interrupted-read", "open")
WRITES = ("write", "writes", "short-write", "sync")
SWEEPS = [
    *(("run-direct", fault) for fault in (*READS, "allocation")),
    *(("run-mmap", fault) for fault in ("read", "open", "map", "allocation")),
    *(("run-numpy", fault) for fault in ("read", "allocation")),
    *((scene, fault) for scene in ("unpack", "pack", "pull") for fault in (*READS, *WRITES)),
    *(("tune", fault) for fault in ("read", "open", "write", "sync", "allocation")),
    *(("compile", fault) for fault in ("read", "open", *WRITES)),
]
# CI takes those that have found something, or that nothing else in it covers.
IN_CI = [
    ("run-direct", "read"),
    ("run-direct", "allocation"),
    ("run-mmap", "map"),
    ("unpack", "write"),
    ("unpack", "sync"),
    ("pull", "write"),
    ("pull", "sync"),
]
CI_RUNS = 6
"""Faults in each sweep in CI, at most."""

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None,
    reason="NOT RUN: faults by counter need Linux, glibc and cc",
)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the shim with the system's compiler."""
    target = tmp_path_factory.mktemp("shim") / "fail_nth.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-fexceptions", "-Wall", "-Wextra", "-o", target, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a bundle of it, and the bundle packed."""
    root = tmp_path_factory.mktemp("faults")
    model = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=8, seed=21))
    emit_bundle(model, root / "bundle", mixed=True)
    pack_bundle(root / "bundle", root / "packed.moec")
    return root


def sweep(
    shim: Path, scene: str, folder: Path, fault: str, first: int = 1, step: int = 1, last: int = 10**6
) -> list[dict[str, Any]]:
    """Run the scene once for each number. Returns the results of `driver.py`.

    Numbers go from `first` in steps of `step` up to `last`, or to the first number above the number of calls. A run
    without a fault comes first. With last=0 it is the only one.
    A process that dies counts as a wrong run.
    """
    told: list[dict[str, Any]] = []
    # The interpreter allocates through the shim. Allocations in its own arenas would not be visible one by one.
    env = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc", "PYTHONPATH": str(ROOT)}
    while True:
        arguments = [shim, scene, folder, fault, *map(str, (first, step, last))]
        command = [sys.executable, "-m", "tests.faults.driver", *map(str, arguments)]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        told += lines[1:] if told else lines
        if done.returncode == 0 or first > last > 0:
            return told
        if not lines:
            raise RuntimeError(f"no run of {scene} without faults: {done.stderr[-3000:]}")
        died = lines[-1]["n"] + step if lines[-1]["n"] else first
        wrong = [f"the process ended with {done.returncode}"]
        told.append({"n": died, "calls": 0, "failed": "?", "code": None, "wrong": wrong, "error": done.stderr[-4000:]})
        first = died + step
    return told


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "scene"))


def step_of(shim: Path, scene: str, folder: Path, fault: str) -> int:
    """Return the distance between the numbers of a sweep."""
    if IS_FULL and scene == "compile":
        return 20
    if IS_FULL and scene == "tune" and fault not in ("write", "sync"):
        return 97  # thousands of calls of engines, which the sweeps of `run` take one by one
    if IS_FULL:
        return 1
    (counted,) = sweep(shim, scene, folder, fault, last=0)
    return max(1, -(-int(counted["calls"]) // CI_RUNS))


@pytest.mark.parametrize(("scene", "fault"), SWEEPS if IS_FULL else IN_CI, ids=lambda value: value)
def test_any_call_may_fail(shim: Path, folder: Path, scene: str, fault: str) -> None:
    step = step_of(shim, scene, folder, fault)
    told = sweep(shim, scene, folder, fault, first=max(1, step // 2), step=step)
    assert told[0]["code"] == 0, told[0]["error"]
    wrong = [each for each in told if each["wrong"]]
    assert not wrong, "\n".join(f"{each['n']} {each['failed']}: {each['wrong']}\n{each['error']}" for each in wrong[:5])
    assert told[0]["calls"] == 0 or any(each["failed"] for each in told), "no call failed: the shim does not work"


def test_a_shim_that_does_nothing_is_seen(folder: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.so"
    subprocess.run(["cc", "-shared", "-o", nothing, "-x", "c", "/dev/null"], check=True)
    with pytest.raises(RuntimeError, match="no run of run-direct"):
        sweep(nothing, "run-direct", folder, "read", last=0)


def test_exit_codes_are_those_of_the_command(shim: Path, folder: Path) -> None:
    (folder / "bundle" / "moec.json").unlink()
    (told,) = sweep(shim, "run-direct", folder, "read", last=0)
    assert told["code"] == 3 and told["wrong"] == []
