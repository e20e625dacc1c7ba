"""Messages of Anthropic's API become those of a chat. What would change the answer and is not supported is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moec.serving.api.endpoints.messages import read_conversation
from moec.serving.api.errors import RequestError
from tests.serving.live_server import LiveServer

USER = {"role": "user", "content": "hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}


def conversation(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return read_conversation(system, list(messages), takes_tools=True)


def answer(*blocks: Any) -> dict[str, Any]:
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
    said = answer(thought, hidden, {"type": "text", "text": "wait"}, {**CALL, **MARK})
    block = {"type": "text", "text": "sunny", **MARK}
    results = user({"type": "text", "text": "so?"}, {**RESULT, "content": [block], "is_error": False, **MARK})
    first, told, result, rest = conversation(USER, said, results)
    assert (first, rest) == (USER, {"role": "user", "content": "so?"})
    assert (told["content"], told["reasoning_content"]) == ("wait", "so")
    assert told["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    empty = {name: value for name, value in RESULT.items() if name != "content"}
    assert conversation(USER, answer(CALL), user(empty))[-1]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "assistant", "content": "The answer"}], "messages"),
        ([USER, answer({**CALL, "other": 1}), user(RESULT)], "messages[1].content[0].other"),
        ([USER, answer({**CALL, "input": "x"}), user(RESULT)], "messages[1].content[0].input"),
        ([USER, answer(CALL), user({**RESULT, "other": 1})], "messages[2].content[0].other"),
        ([USER, answer(CALL), user({**RESULT, "is_error": 1})], "messages[2].content[0].is_error"),
        ([USER, answer(CALL), user({**RESULT, "content": [{"type": "image"}]})], "messages[2].content[0].content[0]"),
        ([USER, answer(CALL), {**user(RESULT), "other": 1}], "messages[2].other"),
        ([USER, answer({"type": "thinking", "thinking": 5}), USER], "messages[1].content[0].thinking"),
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
