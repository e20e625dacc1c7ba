"""Run a client of the server in the environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.serving.live_server import LiveServer

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "build" / "serving-clients"
_OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


def client_python() -> Path:
    """Return the interpreter with the clients. Skips the test where they are not installed, fails in CI."""
    if (CLIENTS / ".ready").exists():
        return CLIENTS / "bin" / "python"
    if os.environ.get("CI"):
        pytest.fail("`make serving-clients` has not filled build/serving-clients")
    pytest.skip("NOT RUN: clients of the server; they need `make serving-clients`")


def run_with_lm_eval(lines: Sequence[Sequence[object]], **variables: str) -> dict[str, Any]:
    """Run command lines of moec in the project's interpreter with the packages of the clients, one after the other.

    Returns `runs`, with code, output and addresses that were asked for, and `loaded`, the names of packages.
    """
    packages = next(client_python().parents[1].glob("lib/python*/site-packages"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.lm_eval_runs"],
        input=json.dumps([[str(word) for word in line] for line in lines]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(packages), **variables},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_client(module: str, server: LiveServer, *words: str, **variables: str) -> dict[str, Any]:
    """Return the JSON that a client's module prints about a server.

    words: arguments after the address of the server.
    variables: of the environment, in addition.
    """
    done = subprocess.run(
        [client_python(), "-m", f"tests.serving.clients.{module}", f"http://127.0.0.1:{server.port}", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env={**os.environ, **_OFFLINE, **variables},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
