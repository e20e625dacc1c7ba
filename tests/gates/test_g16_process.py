"""G16: `moec serve` as a process: signals, storage that never answers, a restart, and the memory budget under load."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.serving.live_server import PATIENCE_S, in_threads

EXAMPLE, PATH = Path(__file__).parents[2] / "examples" / "bundle", "/v1/completions"

pytestmark = [pytest.mark.gate("G16"), pytest.mark.usefixtures("one_thread")]


class Served:
    """`moec serve` in a process of its own."""

    def __init__(self, *options: str, program: Sequence[str] = ("-m", "moec.cli.main")) -> None:
        command = [sys.executable, *program, "serve", str(EXAMPLE), "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                return
        self.port = 0  # it has refused

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.communicate()

    def begin(self, **body: Any) -> HTTPConnection:
        """Begin a request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", PATH, json.dumps({"prompt": "Question:", "temperature": 0, **body}))
        return connection


def test_sigterm_lets_answers_end_and_kill_leaves_a_server_that_starts() -> None:
    with Served("--expert-cache", "50%") as served:
        with contextlib.closing(served.begin(max_tokens=400, stream=True, logit_bias={"2": -100})) as connection:
            reply = connection.getresponse()
            first = reply.readline()
            served.process.send_signal(signal.SIGTERM)
            rest = reply.read()
        assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        assert re.search(rb'"finish_reason":"(stop|length)"', rest)
        assert served.process.wait(PATIENCE_S) == 0
        with pytest.raises(ConnectionError):
            served.begin()
    with Served() as killed, contextlib.closing(killed.begin(max_tokens=400)):
        killed.process.kill()
    with Served() as again, contextlib.closing(again.begin(max_tokens=2)) as connection:
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 2
        with contextlib.closing(again.begin(max_tokens=400)):
            again.process.send_signal(signal.SIGINT)
            assert again.process.wait(PATIENCE_S) == 0


STALLED = """
import sys, threading
import moec.serving.serve
from moec.cli.main import main
from moec.runtime.engine.engine import Engine
moec.serving.serve.STALLED_S = 0.5
moec.serving.serve.LEAVING_S = 0.5
Engine.step = lambda *values, **more: threading.Event().wait()
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_although_its_storage_never_answers(number: signal.Signals) -> None:
    with Served("--deadline", "1", program=("-c", STALLED)) as served:
        with contextlib.closing(served.begin(max_tokens=40)):
            time.sleep(0.5)
            served.process.send_signal(number)
            assert served.process.wait(PATIENCE_S) == 1
        assert served.process.stderr is not None
        said = served.process.stderr.read()
        assert said.splitlines()[-1].startswith("error: the last pass has not ended for 0.5 s"), said


def test_the_budget_holds_under_load() -> None:
    """The least budget that is accepted: long bodies, answers, and log probabilities."""
    with Served("--memory", "1MiB", "--slots", "4") as refused:
        floor = re.findall(r"floor of (\d+)MiB", refused.said)
        assert refused.process.wait(PATIENCE_S) == 1 and floor, refused.said
    budget_mib = int(floor[0])
    with Served("--memory", f"{budget_mib}MiB", "--slots", "4") as served:
        assert served.port, served.said
        ids = {"prompt": [5] * 250_000, "max_tokens": 1}
        long = {"prompt": "x" * 1_100_000, "max_tokens": 1}
        scored = {"prompt": [[5] * 480] * 3, "max_tokens": 1, "echo": True, "logprobs": 20}
        too_many = {**scored, "prompt": [[5] * 510] * 36}
        bodies = [[{"max_tokens": 40, "stream": True}], [ids, long], [scored, {**scored, "stream": True}, too_many]]

        def ask(number: int) -> None:
            for turn in range(4):
                body = bodies[number % 3][turn % len(bodies[number % 3])]
                with contextlib.closing(served.begin(**body)) as connection, connection.getresponse() as found:
                    found.read()
                    assert found.status in (200, 400, 429)

        in_threads([lambda number=number: ask(number) for number in range(8)])  # type: ignore[misc]
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024
        assert peak <= budget_mib << 20
