"""Sweep over the numbers of a fault: a child process per batch, and a new one after each that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fail_nth.c")
LIMIT_S = 3600


def build_shim(folder: Path) -> Path:
    """Compile the shim with the system's compiler."""
    target = folder / "fail_nth.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-fexceptions", "-Wall", "-Wextra", "-o", target, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return target


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
