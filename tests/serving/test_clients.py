"""Real clients over a real connection: openai, litellm, LangChain's OpenAI client, curl."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.serving.clients.client_runs import run_client
from tests.serving.live_server import LiveServer

QUESTION = "How many roses?"
USER = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def expected(answering: LiveServer) -> str:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 24}
    return str(answering.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def expected_text(answering: LiveServer) -> str:
    body = {"prompt": "1 + 1", "temperature": 0, "max_tokens": 4}
    return str(answering.post("/v1/completions", body).json["choices"][0]["text"])


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


def test_openai_responses_with_tools(answering: LiveServer) -> None:
    pytest.importorskip("llguidance")
    found = run_client("with_openai_responses", answering)
    kind, name, arguments, status = found["call"]
    assert (kind, name, status, found["status"]) == ("function_call", "weather", "completed", "completed")
    assert arguments["city"] in ("Rome", "Oslo") and len(set(found["ids"])) == 2
    assert found["parsed"] == json.loads(found["streamed"]) == arguments
    assert found["kinds"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    tool, choice, is_parallel = found["echo"]
    assert (tool["name"], tool["strict"], choice, is_parallel) == ("weather", True, "required", True)
    assert found["named"] == {"type": "function", "name": "weather"} and found["after"]
    assert found["built_in"] == ["unsupported_value", "tools[0].type"]
    assert found["no_result"] == ["invalid_value", "input[1].call_id"]


@pytest.mark.gate("G16")
@pytest.mark.slow
def test_litellm(answering: LiveServer, expected: str, expected_text: str) -> None:
    found = run_client("with_litellm", answering)
    assert (found["whole"], found["streamed"], found["messages"]) == (expected, expected, expected)
    assert found["text"] == expected_text


@pytest.mark.slow
def test_langchain(answering: LiveServer, expected: str, expected_text: str) -> None:
    pytest.importorskip("llguidance")
    found = run_client("with_langchain", answering)
    assert (found["whole"], found["streamed"], found["text"]) == (expected, expected, expected_text)
    assert found["call"]["city"] in ("Rome", "Oslo") and found["structured"] in ("Rome", "Oslo")
    assert found["item"] == found["call"] and found["after"]


def test_curl(answering: LiveServer, expected: str) -> None:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("NOT RUN: curl is not installed")
    body = json.dumps({"messages": [USER], "temperature": 0, "max_tokens": 24})
    address = f"http://127.0.0.1:{answering.port}/v1/chat/completions"
    done = subprocess.run([program, "-sS", address, "-d", body], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected
