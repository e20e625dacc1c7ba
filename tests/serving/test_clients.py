"""Real clients over a real connection: openai, litellm, LangChain's OpenAI client, curl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import load
from moec.serving.api.service import ServiceOptions
from tests.cli.test_run import add_file
from tests.serving.live_server import LiveServer, live_server

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "build" / "serving-clients"
TEMPLATE = (
    b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    b"<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}{% if tools %}tools{% endif %}:"
)
QUESTION = "How many roses?"
USER = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The example bundle with a chat template that takes tools."""
    copy = Path(shutil.copytree(ROOT / "examples" / "bundle", tmp_path_factory.mktemp("clients") / "bundle"))
    add_file(copy, "chat_template.jinja", TEMPLATE)
    options = ServiceOptions("bundle", deadline_s=60)
    with load(copy, slots=2) as engine, live_server(engine, service_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def expected(answering: LiveServer) -> str:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 24}
    return str(answering.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def expected_text(answering: LiveServer) -> str:
    body = {"prompt": "1 + 1", "temperature": 0, "max_tokens": 4}
    return str(answering.post("/v1/completions", body).json["choices"][0]["text"])


def client_python() -> Path:
    """Return the interpreter with the clients. Skips the test where they are not installed, fails in CI."""
    if (CLIENTS / ".ready").exists():
        return CLIENTS / "bin" / "python"
    if os.environ.get("CI"):
        pytest.fail("`make serving-clients` has not filled build/serving-clients")
    pytest.skip("NOT RUN: clients of the server; they need `make serving-clients`")


def run_client(module: str, server: LiveServer) -> dict[str, Any]:
    script = Path(__file__).parent / "clients" / f"{module}.py"
    done = subprocess.run(
        [client_python(), script, f"http://127.0.0.1:{server.port}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_openai(answering: LiveServer, expected: str) -> None:
    pytest.importorskip("llguidance")
    found = run_client("with_openai", answering)
    assert (found["whole"], found["streamed"], found["response"]) == (expected, expected, expected)
    assert (found["model"], found["parsed"]) == ("bundle", "int") and 1 <= found["usage"] <= 24
    assert found["scored"] == len(answering.service.engine.encode("1 + 1")) + 1
    reason, name, arguments = found["call"]
    assert (reason, name) == ("tool_calls", "weather") and arguments["city"] in ("Rome", "Oslo")
    assert found["streamed_call"] == arguments and found["after"] in ("stop", "length")
    assert found["error"] == ["unknown_field", "mirostat"]


def test_litellm(answering: LiveServer, expected: str, expected_text: str) -> None:
    found = run_client("with_litellm", answering)
    assert (found["whole"], found["streamed"], found["messages"]) == (expected, expected, expected)
    assert found["text"] == expected_text


def test_langchain(answering: LiveServer, expected: str, expected_text: str) -> None:
    pytest.importorskip("llguidance")
    found = run_client("with_langchain", answering)
    assert (found["whole"], found["streamed"], found["text"]) == (expected, expected, expected_text)
    assert found["call"]["city"] in ("Rome", "Oslo") and found["structured"] in ("Rome", "Oslo")


def test_curl(answering: LiveServer, expected: str) -> None:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("NOT RUN: curl is not installed")
    body = json.dumps({"messages": [USER], "temperature": 0, "max_tokens": 24})
    address = f"http://127.0.0.1:{answering.port}/v1/chat/completions"
    done = subprocess.run([program, "-sS", address, "-d", body], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected
