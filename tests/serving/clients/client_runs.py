"""Run a client of the server in the environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
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


def run_client(module: str, server: LiveServer, *words: str, **variables: str) -> dict[str, Any]:
    """Return the JSON that a client's script prints about a server.

    words: arguments after the address of the server.
    variables: of the environment, in addition.
    """
    script = Path(__file__).parent / f"{module}.py"
    done = subprocess.run(
        [client_python(), script, f"http://127.0.0.1:{server.port}", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **_OFFLINE, **variables},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
