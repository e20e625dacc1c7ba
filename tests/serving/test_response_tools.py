"""Calls of tools in `/v1/responses`: the same mechanism as in chat completions, in the form of items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moec.serving.api.endpoints.responses import ResponseForm, read_input
from moec.serving.api.errors import RequestError
from moec.serving.engine.request import Ended, Timings, TokenMade
from moec.serving.tools.calls import ToolsOfRequest
from tests.serving.clients.weather import FUNCTION, SCHEMA
from tests.serving.live_server import LiveServer
from tests.serving.test_tools import USER

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {"type": "function", **FUNCTION}
BODY = {"input": "hi", "temperature": 0, "max_output_tokens": 150}
FORCED = {**BODY, "tools": [TOOL], "tool_choice": "required"}
ROME = '{"city": "Rome"}'


def called(call_id: str, arguments: str = ROME, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments, **more}


def result(call_id: str, output: Any = "sunny") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def chat_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


# -- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=str)
def test_a_call_is_that_of_the_chat(answering: LiveServer, choice: Any) -> None:
    pytest.importorskip("llguidance")
    found = answering.post(RESPONSES, {**FORCED, "tool_choice": choice}).json
    (item,) = found["output"]
    asked = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    message = answering.post(CHAT, {**asked, "temperature": 0, "max_tokens": 150}).json["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    assert (item["name"], item["arguments"]) == (function["name"], function["arguments"])
    assert (found["status"], item["type"], item["status"]) == ("completed", "function_call", "completed")
    assert item["id"].startswith("fc") and item["call_id"] != item["id"]
    assert found["tools"] == [{**TOOL, "strict": False}]
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (choice, True)


def test_a_streamed_call(answering: LiveServer) -> None:
    pytest.importorskip("llguidance")
    events = answering.post(RESPONSES, {**FORCED, "stream": True, "parallel_tool_calls": False}).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added, delta, done, ended = events[2:6]
    assert [event["type"] for event in events[2:]] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = events[-1]["response"]["output"]
    assert added["item"] == {**item, "arguments": "", "status": "in_progress"} and ended["item"] == item
    assert delta["delta"] == done["arguments"] == item["arguments"] and done["name"] == "weather"
    assert {event["item_id"] for event in (delta, done)} == {item["id"]}
    assert {event["output_index"] for event in events[2:6]} == {0}
    for event in (events[0], events[1], events[-1]):
        assert event["response"]["tools"] == [{**TOOL, "strict": False}]
        assert event["response"]["tool_choice"] == "required"
        assert event["response"]["parallel_tool_calls"] is False


def test_without_tools_the_response_says_so(answering: LiveServer) -> None:
    text = {**BODY, "max_output_tokens": 2}
    found = answering.post(RESPONSES, text).json
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == ([], "auto", True)
    unused = answering.post(RESPONSES, {**text, "tools": [TOOL], "tool_choice": "none"}).json
    assert (unused["tools"], unused["tool_choice"]) == ([], "none")
    assert unused["usage"]["input_tokens"] == found["usage"]["input_tokens"]


TOOLS = ToolsOfRequest(({"type": "function"},), {"weather": SCHEMA})
CALL = f'<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'


def told(server: LiveServer, text: str, tools: ToolsOfRequest = TOOLS) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of an answer that arrives in pieces of three characters, and the whole response."""
    form = ResponseForm(server.service, 5, False, {}, tools)
    pieces = [TokenMade(0, text[start : start + 3], None) for start in range(0, len(text), 3)]
    ended = Ended("stop", None, Timings(5, 9, 0, 0, None, None, 0, 0, 0, 0, 0))
    data = [each for event in [*pieces, ended] for each in form.add(0, event)]
    events = [json.loads(each.decode().split("data: ")[1]) for each in data]
    return events, form.whole()


def test_text_and_calls_are_items_in_their_order(answering: LiveServer) -> None:
    events, whole = told(answering, f"so {CALL}\n{CALL} more")
    items = whole["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call", "message"]
    assert [item["content"][0]["text"] for item in (items[0], items[3])] == ["so ", " more"]
    assert len({item["id"] for item in items}) == 4 and items[1]["call_id"] != items[2]["call_id"]
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == items
    places = [event["output_index"] for event in events]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}


def test_an_answer_of_one_call_has_no_empty_message(answering: LiveServer) -> None:
    one = ToolsOfRequest(TOOLS.described, TOOLS.parameters, is_parallel=False)
    assert [item["type"] for item in told(answering, CALL + CALL, one)[1]["output"]] == ["function_call"]
    empty = told(answering, "")[1]["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in empty] == [("message", "")]


# -- conversations ------------------------------------------------------------------------------------------------


def test_calls_and_results_go_through_the_template(answering: LiveServer) -> None:
    spoken = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}], "id": "m"}
    items = [USER, spoken, called("a", id="fc", status="completed"), called("b"), result("b"), result("a", "rain")]
    calls = [{**chat_call(each), "function": {"name": "weather", "arguments": ROME}} for each in "ab"]
    history = [
        USER,
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "sunny"},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    found = answering.post(RESPONSES, {**BODY, "input": items, "max_output_tokens": 8, "tools": [TOOL]}).json
    asked = {"messages": history, "temperature": 0, "max_tokens": 8}
    chat = answering.post(CHAT, {**asked, "tools": [{"type": "function", "function": FUNCTION}]}).json
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_an_answer_comes_back_as_input(answering: LiveServer) -> None:
    pytest.importorskip("llguidance")
    (call,) = answering.post(RESPONSES, FORCED).json["output"]
    items = [USER, call, result(call["call_id"], [{"type": "input_text", "text": "sunny"}])]
    reply = answering.post(RESPONSES, {**BODY, "input": items, "max_output_tokens": 4, "tools": [TOOL]})
    assert reply.status == 200 and reply.json["output"][0]["type"] == "message"


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


RESULT = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [chat_call("a")]}
TURNS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([called("a"), result("a")], [CALLED, RESULT]),
    ([called("a"), result("a"), called("a"), result("a")], [CALLED, RESULT, CALLED, RESULT]),
    ([called("a"), USER, result("a")], [CALLED, USER, RESULT]),
    ([called("a"), said("x"), result("a")], [{**CALLED, "content": "x"}, RESULT]),
    ([said("x"), called("a"), said("y"), result("a"), said("z")], [{**CALLED, "content": "xy"}, RESULT, said("z")]),
    ([said("x"), said("y")], [said("x"), said("y")]),
    ([thought("t"), called("a"), result("a")], [{**CALLED, "reasoning_content": "t"}, RESULT]),
    ([thought("t"), said("x"), USER], [{**said("x"), "reasoning_content": "t"}, USER]),
    ([thought("t"), USER, said("x")], [USER, said("x")]),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, said("x")], [said("x")]),
]


@pytest.mark.parametrize(("items", "messages"), TURNS, ids=range(len(TURNS)))
def test_items_of_one_answer_become_one_message(items: list[Any], messages: list[dict[str, Any]]) -> None:
    assert read_input(items, takes_tools=True) == messages


# -- what is refused ----------------------------------------------------------------------------------------------

LONG = "a" * 100_000
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [TOOL] * 129}, "tools"),
    *(
        ({"tools": [{"type": kind}]}, "tools[0].type")
        for kind in ("web_search", "file_search", "code_interpreter", "mcp", "custom", 5, ["function"], None)
    ),
    ({"tools": [{"type": "function", "function": FUNCTION}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": LONG}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "parameters": "x"}]}, "tools[0].parameters"),
    ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [{**TOOL, "description": ["x"]}]}, "tools[0].description"),
    ({"tools": [{**TOOL, "more": 1}]}, "tools[0].more"),
    ({"tools": [{**TOOL, "strict": True}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "often"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": ["required"]}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": LONG}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [TOOL], "max_tool_calls": 1}, "max_tool_calls"),
    ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [thought("x"), {"role": "user"}]}, "input[1].content"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": [5]}]}, "input[0].content[0]"),
    ({"input": [{"role": "assistant", "content": "", "tool_calls": [chat_call("a")]}]}, "input[0].tool_calls"),
    ({"input": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "input[0].role"),
    ({"input": [called("a")]}, "input[0].call_id"),
    ({"input": [called("a"), called("a"), result("a")]}, "input[1].call_id"),
    ({"input": [called("a"), result("b")]}, "input[1].call_id"),
    ({"input": [result("a"), called("a")]}, "input[0].call_id"),
    ({"input": [called("a"), result("a"), result("a")]}, "input[2].call_id"),
    ({"input": [called("a"), {"type": "function_call_output", "call_id": "a"}]}, "input[1].output"),
    ({"input": [called("a"), result("a", 5)]}, "input[1].output"),
    ({"input": [called("a"), result("a", [{"type": "input_image", "image_url": "x"}])]}, "input[1].output[0]"),
    ({"input": [called("a"), {**result("a"), "more": 1}]}, "input[1].more"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [called(LONG), result(LONG)]}, "input[0].call_id"),
    ({"input": [called("a", name=LONG), result("a")]}, "input[0].name"),
    ({"input": [called("a", name=["f"]), result("a")]}, "input[0].name"),
    ({"input": [called("a", name=None), result("a")]}, "input[0].name"),
    ({"input": [called("a", more=1), result("a")]}, "input[0].more"),
    *(
        ({"input": [called("a", arguments), result("a")]}, "input[0].arguments")
        for arguments in ("no", "[1]", "null", "[" * 50_000, '{"a": ' + "9" * 5000 + "}", {"city": "Rome"}, "\ud800")
    ),
]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[f"{at}-{param}" for at, (_, param) in enumerate(WRONG)])
def test_wrong_values_are_named(answering: LiveServer, change: dict[str, Any], param: str) -> None:
    reply = answering.post(RESPONSES, {**BODY, **change})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param and len(reply.error["message"]) < 1000


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_arguments_that_no_json_has_end_nothing(answering: LiveServer, arguments: str) -> None:
    items = [USER, called("a", arguments), result("a")]
    reply = answering.post(RESPONSES, {**BODY, "input": items, "max_output_tokens": 1})
    assert reply.status in (200, 400), reply.body
    assert answering.post(RESPONSES, {**BODY, "max_output_tokens": 1}).status == 200


def test_a_template_without_tools_is_named(server: LiveServer) -> None:
    for change, param in (({"tools": [TOOL]}, "tools"), ({"input": [called("a"), result("a")]}, "input[0].type")):
        reply = server.post(RESPONSES, {**BODY, **change})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "tools_not_supported", param)
    with pytest.raises(RequestError, match="no chat template that takes tools"):
        read_input([result("a")], takes_tools=False)
