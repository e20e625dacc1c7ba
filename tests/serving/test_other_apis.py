"""`/v1/responses` and `/v1/messages`: the same answer as chat completions, in other forms, and equal defaults."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import Engine, load
from moec.runtime.text.generation_defaults import PLAIN
from moec.runtime.text.sampling import SamplingOptions
from moec.serving.api.endpoints.messages import read_conversation
from moec.serving.api.errors import RequestError
from moec.serving.api.fields import Fields, read_sampling
from moec.serving.api.service import ServiceOptions
from tests.listed_file import add_listed
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
    add_listed(copy, "chat_template.jinja", template)
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


USER = {"role": "user", "content": "hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}


def conversation(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return read_conversation(system, list(messages), takes_tools=True)


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_blocks_of_the_system_are_one_text() -> None:
    blocks = [{"type": "text", "text": "Be brief. ", **MARK}, {"type": "text", "text": "Use English."}]
    found = conversation(user({"type": "text", "text": "hi", **MARK}), system=blocks)
    assert found == [{"role": "system", "content": "Be brief. Use English."}, USER]


def test_calls_results_and_thinking() -> None:
    thought = {"type": "thinking", "thinking": "so", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    turn = said(thought, hidden, {"type": "text", "text": "wait"}, {**CALL, **MARK})
    block = {"type": "text", "text": "sunny", **MARK}
    results = user({"type": "text", "text": "so?"}, {**RESULT, "content": [block], "is_error": False, **MARK})
    first, told, result, rest = conversation(USER, turn, results)
    assert (first, rest) == (USER, {"role": "user", "content": "so?"})
    assert (told["content"], told["reasoning_content"]) == ("wait", "so")
    assert told["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    empty = {name: value for name, value in RESULT.items() if name != "content"}
    assert conversation(USER, said(CALL), user(empty))[-1]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "assistant", "content": "The answer"}], "messages"),
        ([USER, said({**CALL, "other": 1}), user(RESULT)], "messages[1].content[0].other"),
        ([USER, said({**CALL, "input": "x"}), user(RESULT)], "messages[1].content[0].input"),
        ([USER, said(CALL), user({**RESULT, "other": 1})], "messages[2].content[0].other"),
        ([USER, said(CALL), user({**RESULT, "is_error": 1})], "messages[2].content[0].is_error"),
        ([USER, said(CALL), user({**RESULT, "content": [{"type": "image"}]})], "messages[2].content[0].content[0]"),
        ([USER, said(CALL), {**user(RESULT), "other": 1}], "messages[2].other"),
        ([USER, said({"type": "thinking", "thinking": 5}), USER], "messages[1].content[0].thinking"),
        ([user({"type": "image", "source": {}})], "messages[0].content[0]"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_where_it_is(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_conversation(None, messages, takes_tools=True)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_an_answer_that_was_begun_is_refused(answering: LiveServer) -> None:
    """Anthropic's API continues it. A new answer instead would be a wrong one."""
    body = {"max_tokens": 5, "messages": [USER, {"role": "assistant", "content": "The answer is"}]}
    reply = answering.post("/v1/messages", body)
    assert reply.status == 400 and "cannot continue" in reply.error["message"]


OF_BUNDLE = SamplingOptions(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
GREEDY = SamplingOptions()


def chosen(defaults: SamplingOptions, **body: Any) -> tuple[float, ...]:
    """Return temperature, top-k, top-p, min-p and repetition penalty of a request."""
    found = read_sampling(Fields(body), 100, defaults)
    return (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty)


@pytest.mark.parametrize(
    ("defaults", "body", "wanted"),
    [
        (PLAIN, {}, (1, 0, 1, 0, 1)),
        (OF_BUNDLE, {}, (0.6, 20, 0.95, 0, 1.1)),
        (OF_BUNDLE, {"temperature": None}, (0.6, 20, 0.95, 0, 1.1)),
        (OF_BUNDLE, {"temperature": 1, "top_k": -1}, (1, 0, 0.95, 0, 1.1)),
        (OF_BUNDLE, {"temperature": 0}, (0, 0, 1, 0, 1)),
        (OF_BUNDLE, {"temperature": 0, "top_p": 0.9, "repetition_penalty": 1.3}, (0, 0, 1, 0, 1.3)),
        (OF_BUNDLE, {"top_k": 1}, (0, 0, 1, 0, 1)),
        (PLAIN, {"top_p": 0}, (0, 0, 1, 0, 1)),
        (GREEDY, {}, (0, 0, 1, 0, 1)),
        (GREEDY, {"min_p": 0.1}, (1, 0, 1, 0.1, 1)),
        (GREEDY, {"temperature": 0.5}, (0.5, 0, 1, 0, 1)),
    ],
    ids=str,
)
def test_a_request_counts_more(defaults: SamplingOptions, body: dict[str, Any], wanted: tuple[float, ...]) -> None:
    assert chosen(defaults, **body) == wanted


def test_every_api_has_the_recommendation(engine: Engine) -> None:
    user = [{"role": "user", "content": "hi"}]
    common = {"seed": 5, "max_tokens": 12}
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}
    with live_server(engine, service_options=ServiceOptions("tiny", OF_BUNDLE, deadline_s=60)) as server:
        props = server.ask("GET", "/props").json["sampling"]
        for path, body in (
            ("/v1/completions", {"prompt": "hi", **common}),
            ("/v1/chat/completions", {"messages": user, **common}),
            ("/v1/messages", {"messages": user, **common}),
            ("/v1/responses", {"input": "hi", "seed": 5, "max_output_tokens": 12}),
        ):
            implied, said = server.post(path, body).json, server.post(path, {**body, **wanted}).json
            for each in (implied, said):
                each.update(id="", created=0, created_at=0, timings={}, usage={})
            if path == "/v1/responses":
                assert (implied["temperature"], implied["top_p"]) == (0.6, 0.95)
                implied, said = ({"text": each["output"][0]["content"]} for each in (implied, said))
            assert implied == said
    assert props == {name: value for name, value in wanted.items() if name != "seed"} | {"min_p": 0.0}
