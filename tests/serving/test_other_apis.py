"""`/v1/responses` and `/v1/messages`: the same answer as chat completions, in other forms."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import load
from tests.cli.test_run import add_file
from tests.serving.live_server import LiveServer, Reply, live_server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}


def names(reply: Reply) -> list[str]:
    return [line[7:] for line in reply.body.decode().splitlines() if line.startswith("event: ")]


@pytest.fixture
def answer(server: LiveServer) -> str:
    body = {"messages": [{"role": "system", "content": "be brief"}, USER], "max_tokens": 10, "temperature": 0}
    return str(server.post(CHAT, body).json["choices"][0]["message"]["content"])


def test_a_response_is_that_of_the_chat(server: LiveServer, answer: str) -> None:
    body = {"instructions": "be brief", "input": "hi", "max_output_tokens": 10, "temperature": 0}
    found = server.post(RESPONSES, body).json
    assert found["output"][0]["content"][0]["text"] == answer
    assert (found["object"], found["output"][0]["role"]) == ("response", "assistant")
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["usage"]["output_tokens"] == 10
    nothing = {"reasoning": found["reasoning"], "include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    assert server.post(RESPONSES, {**body, **nothing}).json["output"][0]["content"][0]["text"] == answer
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert server.post(RESPONSES, {**body, "input": items}).json["output"][0]["content"][0]["text"] == answer


def test_a_streamed_response(server: LiveServer, answer: str) -> None:
    body = {"instructions": "be brief", "input": "hi", "max_output_tokens": 10, "temperature": 0, "stream": True}
    reply = server.post(RESPONSES, body)
    kinds, events = names(reply), reply.events
    assert kinds == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == answer
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == answer


def test_a_message_is_that_of_the_chat(server: LiveServer, answer: str) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 10, "temperature": 0, "system": "be brief", "messages": [{"role": "user", "content": [part]}]}
    found = server.post(MESSAGES, body).json
    assert found["content"] == [{"type": "text", "text": answer}]
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = found["usage"]
    counted = server.post(f"{MESSAGES}/count_tokens", {"system": "be brief", "messages": [USER]}).json["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted and usage["output_tokens"] == 10
    stop = answer[2:4]
    stopped = server.post(MESSAGES, {**body, "stop_sequences": [stop]}).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)


def test_a_streamed_message(server: LiveServer, answer: str) -> None:
    body = {"max_tokens": 10, "temperature": 0, "system": "be brief", "messages": [USER], "stream": True}
    reply = server.post(MESSAGES, body)
    kinds, events = names(reply), reply.events
    assert kinds == [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == answer
    assert events[-2]["delta"]["stop_reason"] == "max_tokens" and events[-2]["usage"]["output_tokens"] == 10


WRONG: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {}),
    (RESPONSES, {"input": 5}),
    (RESPONSES, {"input": "a", "previous_response_id": "resp-1"}),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}),
    (RESPONSES, {"input": [{"type": "function_call_output"}]}),
    (RESPONSES, {"input": [{"role": "user"}]}),
    (RESPONSES, {"input": "a", "include": ["message.output_text.logprobs"]}),
    (RESPONSES, {"input": "a", "include": ["unknown"]}),
    (RESPONSES, {"input": "a", "reasoning": {"effort": 5}}),
    (RESPONSES, {"input": "a", "reasoning": {"effort": "x" * 33}}),
    (RESPONSES, {"input": "a", "reasoning": {"unknown": 1}}),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "xml"}}}),
    (MESSAGES, {"messages": [USER]}),
    (MESSAGES, {"messages": [USER], "max_tokens": 0}),
    (MESSAGES, {"messages": [{"role": "system", "content": "a"}], "max_tokens": 5}),
    (MESSAGES, {"messages": [USER], "max_tokens": 5, "tools": [{"name": "x"}]}),
    (MESSAGES, {"messages": [USER], "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 99}}),
    (MESSAGES, {"messages": [USER], "max_tokens": 5, "unknown": 1}),
]


@pytest.mark.parametrize(("path", "body"), WRONG, ids=[str(body)[:50] for _, body in WRONG])
def test_wrong_bodies(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error" and reply.error["message"]
    assert ("type" in reply.json) == (path == MESSAGES)


@pytest.fixture(scope="module")
def thinking(tiny_bundle: Path, chat_bundle: Path) -> Iterator[LiveServer]:
    """A model whose template opens `<think>`, so that its whole answer is thinking."""
    template = b"{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}!<think>\n"
    copy = Path(shutil.copytree(tiny_bundle, chat_bundle.parent / "thinking"))
    add_file(copy, "chat_template.jinja", template)
    with load(copy, context=96, slots=2) as engine, live_server(engine) as running:
        yield running


def test_thinking_is_kept_apart_in_every_form(thinking: LiveServer) -> None:
    limit = {"temperature": 0, "max_tokens": 8}
    chat = thinking.post(CHAT, {"messages": [USER], **limit}).json
    message = chat["choices"][0]["message"]
    thought = message["reasoning_content"]
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
    assert message["content"] == "" and thought
    found = thinking.post(MESSAGES, {"messages": [USER], **limit}).json["content"]
    assert found == [{"type": "thinking", "thinking": thought, "signature": ""}]
    response = thinking.post(RESPONSES, {"input": "hi", "temperature": 0, "max_output_tokens": 8}).json
    output = response["output"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 8}
    assert output[0]["type"] == "reasoning" and output[0]["content"][0]["text"] == thought
    assert [item["status"] for item in output] == ["incomplete", "incomplete"]
    streamed = thinking.post(MESSAGES, {"messages": [USER], "stream": True, **limit}).events
    assert "".join(event["delta"].get("thinking", "") for event in streamed if "delta" in event) == thought
