"""`/v1/chat/completions` over a real connection."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.thinking import ThinkingSplitter
from moec.runtime import Engine, load
from moec.serving.api.endpoints.chat import read_messages
from moec.serving.api.fields import MAX_ANSWERS
from tests.listed_file import add_listed
from tests.serving.conftest import CONTEXT
from tests.serving.live_server import LiveServer, live_server

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
GREEDY = {"messages": MESSAGES, "max_tokens": 10, "temperature": 0}


def expected(engine: Engine, text: str = "[system] be brief[user] hi!") -> str:
    tokens = engine.encode(text, adds_special_tokens=False)
    return "".join(step.text for step in engine.generate(tokens, 10))


def test_a_chat_goes_through_the_template(server: LiveServer, engine: Engine) -> None:
    found = server.post(PATH, GREEDY).json
    message = found["choices"][0]["message"]
    assert message == {"role": "assistant", "content": expected(engine), "refusal": None}
    assert (found["object"], found["choices"][0]["logprobs"]) == ("chat.completion", None)


def test_a_streamed_chat(server: LiveServer, engine: Engine) -> None:
    events = server.post(PATH, {**GREEDY, "stream": True}).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected(engine)
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"][0]["delta"] == {}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_parts_and_roles(server: LiveServer, engine: Engine) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    found = server.post(PATH, {**GREEDY, "messages": messages}).json
    assert found["choices"][0]["message"]["content"] == expected(engine)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo", "tool_calls": [], "refusal": None, "reasoning_content": "hm"},
        {"role": "user", "content": "on"},
    ]
    found = server.post(PATH, {**GREEDY, "messages": history}).json
    assert found["choices"][0]["message"]["content"] == expected(engine, "[user] hi[assistant] yo[user] on!")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_that_comes_back_is_handed_to_the_template(name: str) -> None:
    given = {"role": "assistant", "content": "yo", name: "hm", "reasoning_details": [{"type": "reasoning.text"}]}
    marked = {"timestamp": 1764460800, "cache_control": {"type": "ephemeral"}}
    (message,) = read_messages([{**given, **marked}])
    assert message == {"role": "assistant", "content": "yo", "reasoning_content": "hm"}


def text_of(data: bytes) -> str:
    """Return the text of a token; bytes that are none as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def test_log_probabilities(server: LiveServer) -> None:
    body = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    content = server.post(PATH, body).json["choices"][0]["logprobs"]["content"]
    assert len(content) >= 1
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
        assert text_of(bytes(entry["bytes"])) == entry["token"]
    events = server.post(PATH, {**body, "stream": True}).events
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in streamed if part for entry in part["content"]] == content


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_field"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_field"),
    ({"messages": [{"role": "user", "content": "a \ud800"}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}]},
        "messages[0].content[0].foo",
        "unknown_field",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "unsupported_value",
    ),
    ({"messages": [{"role": "user", "content": "x", "colour": "me"}]}, "messages[0].colour", "unknown_field"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages", "InputError"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "missing_field"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
    ({"reasoning_effort": 5}, "reasoning_effort", "invalid_value"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_value"),
]


@pytest.mark.parametrize(("change", "param", "code"), WRONG, ids=[str(change)[:40] for change, _, _ in WRONG])
def test_wrong_fields_are_named(server: LiveServer, change: dict[str, Any], param: str, code: str) -> None:
    reply = server.post(PATH, {**GREEDY, **change})
    assert reply.status == 400, reply.body
    assert (reply.error["param"], reply.error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "`messages` must have a message, found an empty list"),
        ({"stream": "yes"}, "`stream` must be true or false, found 'yes'"),
        ({"n": True}, f"`n` must be a whole number of 1 to {MAX_ANSWERS}, found true"),
        ({"logprobs": True, "modalities": ["audio"]}, 'is not supported with this value; it can be ["text"]'),
        ({"messages": [{"role": "user", "content": "a \ud800"}]}, "is not Unicode at character 2"),
    ],
)
def test_messages_have_the_words_of_json(server: LiveServer, change: dict[str, Any], message: str) -> None:
    assert message in server.post(PATH, {**GREEDY, **change}).error["message"]


def test_a_long_conversation_is_told_in_tokens_and_in_bytes_where_they_are_not_counted(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello " * 200}]
    error = server.post(PATH, {**GREEDY, "messages": messages}).error
    count = len(server.service.engine.encode(f"[user] {'hello ' * 200}!", adds_special_tokens=False))
    assert f"{count} tokens" in error["message"] and f"context of {CONTEXT} tokens" in error["message"]
    error = server.post("/v1/completions", {**GREEDY, "messages": None, "prompt": "a " * 400_000}).error
    assert "has 800000 bytes, so its tokens are not counted" in error["message"]
    assert f"context of {CONTEXT} tokens" in error["message"] and error["code"] == "context_length_exceeded"
    reply = server.post(PATH, {**GREEDY, "messages": [{"role": "user", "content": "a" * (2 << 20)}]})
    assert reply.status == 413 and f"context of {CONTEXT} tokens" in reply.error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_an_image_is_told_as_one(server: LiveServer, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, {"type": kind}]}]
    error = server.post(PATH, {**GREEDY, "messages": messages}).error
    assert error["message"] == "`messages[0].content[1]` is an image, and this model reads no images"


def test_variables_of_a_request_reach_the_template(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    add_listed(copy, "chat_template.jinja", b"{{ enable_thinking }}/{{ reasoning_effort }}/{{ messages[0].content }}")
    with load(copy, context=CONTEXT, slots=1) as engine, live_server(engine) as server:
        texts, encode = list[str](), engine.encode
        monkeypatch.setattr(engine, "encode", lambda text, *more: texts.append(text) or encode(text, *more))
        user = {"role": "user", "content": "hi"}
        off = {"enable_thinking": False, "messages": [{"role": "user", "content": "another"}]}
        for path, body in (
            (PATH, {"messages": [user], "max_tokens": 1, "chat_template_kwargs": off}),
            (PATH, {"messages": [user], "max_tokens": 1, "reasoning_effort": "low"}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "high"}}),
            (PATH, {"messages": [user], "max_tokens": 1}),
        ):
            assert server.post(path, body).status == 200
    assert texts == ["False//hi", "/low/hi", "/high/hi", "//hi"]


def test_what_asks_for_nothing_is_accepted(server: LiveServer, engine: Engine) -> None:
    more = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "u", "n": 1}
    found = server.post(PATH, {**GREEDY, **more}).json
    assert found["choices"][0]["message"]["content"] == expected(engine)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("is_open", "text", "thought", "answer"),
    [
        (False, "<think>\nso so</think>\n\nyes", "so so", "yes"),
        (True, "so</thin so</think>yes", "so</thin so", "yes"),
        (False, "no <think> here", "", "no <think> here"),
        (False, "<thin", "", "<thin"),
        (False, "<think>never ends </th", "never ends </th", ""),
        (False, "<think></think>", "", ""),
    ],
)
def test_thinking_is_kept_apart(is_open: bool, text: str, thought: str, answer: str, size: int) -> None:
    splitter, parts = ThinkingSplitter(is_open), list[tuple[bool, str]]()
    for start in range(0, len(text), size):
        parts += splitter.push(text[start : start + size])
    parts += splitter.flush()
    assert "".join(part for is_thought, part in parts if is_thought) == thought
    assert "".join(part for is_thought, part in parts if not is_thought) == answer


TURNS, MOST = 10, 1.2
QUESTIONS = [f"How many roses are {number} roses and {number + 3} more?" for number in range(2, 2 + TURNS)]


@pytest.mark.gate("G16")
def test_the_tenth_turn_computes_what_is_new(answering: LiveServer) -> None:
    """What is new since the ninth answer, while others ask, too."""
    messages: list[dict[str, str]] = []
    engine, held = answering.service.engine, 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        found = answering.post(PATH, {"messages": messages, "temperature": 0, "max_tokens": 8}).json
        usage = found["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        new = usage["prompt_tokens"] - held
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        held = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token is not computed
        other = answering.post("/v1/completions", {"prompt": f"{question} Ruth", "max_tokens": 2, "temperature": 0})
        assert other.status == 200
    assert engine.options.slots == 2 and usage["prompt_tokens"] > 10 * new
    assert computed <= MOST * new
