"""Many cases in one process with limits of the system, so that none of them can take the test run along."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def outcomes(module: str, address_bytes: int, cpu_s: int) -> dict[str, dict[str, Any]]:
    """Return what `report` printed in a process that runs a module as its main program, by name of the case.

    address_bytes: most address space of the process. cpu_s: most processor time of it, seconds.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    found = {row["name"]: row for row in rows}
    found["process"] = {"status": done.returncode, "stderr": done.stderr}
    return found


def report(cases: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Print one line for each case: the class of the error and its text, or what came back."""
    for name, call in cases:
        try:
            row = {"value": repr(call())[:200]}
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            row = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({"name": name, **row}), flush=True)
