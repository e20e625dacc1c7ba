"""Calls of tools: read from what models write, asked for by `tool_choice`, and told in the forms of both APIs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import load
from moec.serving.tools.calls import NO_TOOLS, ToolsOfRequest
from moec.serving.tools.chat_form import ChatForm, chat_form_of
from tests.listed_file import add_listed
from tests.serving.clients.weather import FUNCTION, SCHEMA, WEATHER
from tests.serving.live_server import LiveServer, live_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USER = {"role": "user", "content": "hi"}
BODY = {"messages": [USER], "temperature": 0, "max_tokens": 150}
HERMES = (
    b"{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    b"{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}!"
)
PARAMETERS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
TOOLS = ToolsOfRequest(({"type": "function"},), PARAMETERS)


class NoSpecialTokens:
    """A vocabulary that spells all marks."""

    def id_of(self, piece: str) -> int | None:
        return None

    def decode(self, ids: Any) -> str:
        return ""


def form_of(template: str) -> ChatForm:
    return chat_form_of([template.encode()], NoSpecialTokens())


def split(template: str, text: str, size: int, tools: ToolsOfRequest = TOOLS) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return thinking, text and calls of an answer that arrives in pieces."""
    parts, shown = form_of(template).parts(False, tools), list[tuple[bool, str]]()
    for start in range(0, len(text), size):
        shown += parts.push(text[start : start + size])
    shown += parts.flush()
    calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return (
        "".join(each for is_thought, each in shown if is_thought),
        "".join(each for is_thought, each in shown if not is_thought),
        calls,
    )


ONE, BOTH = [("f", {"a": 1, "b": "2"})], [("f", {"a": 1, "b": "2"}), ("g", {})]
CALL = '{"name": "f", "arguments": {"a": 1, "b": "2"}}'
DEEPSEEK_BEGIN, DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK = "<\uff5ctool\u2581call\u2581begin\uff5c>{}<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581call\u2581end\uff5c>"
FENCED = f"f\n```json\n{json.dumps(BOTH[0][1])}\n```"
HARMONY = "tools <|channel|>"
ANSWERS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    ("tools <tool_call>", f"so <tool_call>\n{CALL}\n</tool_call>", "", "so ", ONE),
    ("tools <tool_call>", f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>', "", "", BOTH),
    ("tools <tool_call><think>", f"<think>hm</think>ok<tool_call>{CALL}</tool_call>", "hm", "ok", ONE),
    ("tools <tool_call>", f"<tool_call>{CALL}", "", "", ONE),
    ("tools <tool_call>", "<tool_call>{no json</tool_call> more", "", "<tool_call>{no json</tool_call> more", []),
    ("tools <tool_call>", "1 <tool and <tool_cal", "", "1 <tool and <tool_cal", []),
    ("tools <tool_call>", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", "", [("f", {})]),
    (
        "tools <tool_call><arg_key>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call><tool_call>g</tool_call>",
        "",
        "",
        BOTH,
    ),
    (
        "tools <tool_call><function=",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        "",
        ONE,
    ),
    ("tools [TOOL_CALLS]", f'[TOOL_CALLS] [{CALL}, {{"name": "g", "arguments": {{}}}}]', "", "", BOTH),
    ("tools [TOOL_CALLS]", "[TOOL_CALLS] [1]", "", "[TOOL_CALLS] [1]", []),
    ("tools <|tool_call|>", f"<|tool_call|>[{CALL}]", "", "", ONE),
    (
        f"tools {DEEPSEEK_BEGIN}",
        f"{DEEPSEEK_BEGIN}{DEEPSEEK.format('function', FENCED)}{DEEPSEEK.format('g', '{}')}{DEEPSEEK_END}",
        "",
        "",
        BOTH,
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{json.dumps(ONE[0][1])}",
        "hm",
        "",
        ONE,
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
        "hm",
        "yes",
        [],
    ),
    (HARMONY, "no channels", "", "no channels", []),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text", "thought", "shown", "calls"),
    ANSWERS,
    ids=[f"{at}-{each[0]}" for at, each in enumerate(ANSWERS)],
)
def test_calls_are_read(
    template: str, text: str, thought: str, shown: str, calls: list[tuple[str, Any]], size: int
) -> None:
    assert split(template, text, size) == (thought, shown, calls)


def test_without_tools_a_call_stays_text() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert split("tools <tool_call>", text, 3, NO_TOOLS) == ("", text, [])


def test_parallel_calls_can_be_left_out() -> None:
    one = ToolsOfRequest(({"type": "function"},), PARAMETERS, is_parallel=False)
    text = f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "g"}}</tool_call>'
    assert split("tools <tool_call>", text, 5, one)[2] == ONE


def test_special_tokens_between_parts_become_text() -> None:
    """Templates in `tokenizer_config.json` are escaped. Only tokens that decoding leaves out need a text."""

    class Special(NoSpecialTokens):
        def id_of(self, piece: str) -> int | None:
            return {DEEPSEEK_BEGIN: 7, DEEPSEEK_END: 8}.get(piece)

        def decode(self, ids: Any) -> str:
            return "" if ids == [7] else "shown"

    form = chat_form_of([json.dumps({"chat_template": f"tools {DEEPSEEK_BEGIN}"}).encode()], Special())
    assert form.syntax is not None and form.syntax.name == "DeepSeek"
    assert form.marks == {7: DEEPSEEK_BEGIN}


# -- over a real connection ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The example with a template that writes calls as Hermes does. The model has never seen a call."""
    copy = Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("calling") / "calls"))
    add_listed(copy, "chat_template.jinja", HERMES)
    with load(copy, context=512, slots=2) as engine, live_server(engine) as running:
        yield running


MARKS = ("<tool_call>", "</tool_call>", "<|im_end|>")


def mark_special(bundle: Path, *marks: str) -> None:
    """Add special tokens to the tokenizer of a bundle."""
    tokenizer = json.loads((bundle / "tokenizer.json").read_bytes())
    first = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": first + at, "content": mark} for at, mark in enumerate(marks)
    ]
    add_listed(bundle, "tokenizer.json", json.dumps(tokenizer).encode())


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The same with marks that are special tokens, as those of Qwen."""
    copy = Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("special") / "calls"))
    mark_special(copy, *MARKS)
    add_listed(copy, "chat_template.jinja", HERMES)
    with load(copy, context=512, slots=2) as engine, live_server(engine) as running:
        assert all(engine.tokenizer.id_of(mark) is not None for mark in MARKS)
        yield running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_call_can_be_asked_for_where_its_marks_are_special_tokens(
    special: LiveServer, choice: Any, is_parallel: bool
) -> None:
    pytest.importorskip("llguidance")
    body = {**BODY, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": is_parallel}
    reply = special.post(CHAT, body)
    assert reply.status == 200, reply.body
    found = reply.json["choices"][0]
    assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", None)
    (call,) = found["message"]["tool_calls"]
    check_call(call)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "<|im_end|>"},
        {"enum": ["<tool_call>"]},
        {"type": "object", "properties": {"</tool_call>": {"const": "a<|im_end|>b"}}, "required": ["</tool_call>"]},
        {"type": "string", "pattern": "^</s>$"},
    ],
    ids=["const", "enum", "name", "pattern"],
)
def test_a_schema_may_spell_a_special_token(special: LiveServer, schema: dict[str, Any]) -> None:
    """The model writes its characters, never the token, which would end the answer or stay hidden."""
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    schema = {**schema, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    reply = special.post(CHAT, {**BODY, "response_format": form})
    assert reply.status == 200, reply.body
    jsonschema.validate(json.loads(reply.json["choices"][0]["message"]["content"]), schema)


def check_call(call: dict[str, Any]) -> None:
    assert call["type"] == "function" and call["function"]["name"] == "weather" and call["id"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_can_be_asked_for(calling: LiveServer, choice: Any) -> None:
    pytest.importorskip("llguidance")
    found = calling.post(CHAT, {**BODY, "tools": [WEATHER], "tool_choice": choice}).json["choices"][0]
    assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", None)
    (call,) = found["message"]["tool_calls"]
    check_call(call)


def test_a_streamed_call(calling: LiveServer) -> None:
    pytest.importorskip("llguidance")
    body = {**BODY, "tools": [WEATHER], "tool_choice": "required", "stream": True}
    choices = [event["choices"][0] for event in calling.post(CHAT, body).events]
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    check_call(call)
    assert call["index"] == 0 and choices[-1]["finish_reason"] == "tool_calls"
    assert not any(choice["delta"].get("content") for choice in choices)


def test_a_call_in_the_form_of_anthropic(calling: LiveServer) -> None:
    pytest.importorskip("llguidance")
    tool = {"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}
    body = {**BODY, "tools": [tool], "tool_choice": {"type": "any"}}
    found = calling.post(MESSAGES, body).json
    (block,) = found["content"]
    assert (found["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "weather")
    assert block["input"]["city"] in ("Rome", "Oslo")
    events = calling.post(MESSAGES, {**body, "stream": True}).events
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[1]["content_block"]["input"] == {}
    assert json.loads(events[2]["delta"]["partial_json"]) == block["input"]


def test_calls_and_results_go_through_the_template(calling: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    written = (
        '[user] hi[assistant] <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>[tool] sunny!'
    )
    tools = json.dumps([WEATHER])
    count = len(calling.service.engine.encode(tools + written, adds_special_tokens=False))
    asked = calling.post(CHAT, {**BODY, "messages": history, "tools": [WEATHER]})
    assert asked.status == 200 and asked.json["usage"]["prompt_tokens"] == count
    blocks = [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ]
    tool = {"name": "weather", "description": FUNCTION["description"], "input_schema": SCHEMA}
    counted = calling.post(f"{MESSAGES}/count_tokens", {"messages": blocks, "tools": [tool]}).json
    assert counted["input_tokens"] == count


STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "more": 5}}]}, "tools[0].function.more"),
    ({"tools": [WEATHER], "tool_choice": "often"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [STRICT]}, "tools"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[str(change)[:60] for change, _ in WRONG])
def test_wrong_tools_are_named(calling: LiveServer, change: dict[str, Any], param: str) -> None:
    reply = calling.post(CHAT, {**BODY, **change})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param


def test_a_template_without_tools_is_named(server: LiveServer) -> None:
    reply = server.post(CHAT, {**BODY, "tools": [WEATHER]})
    assert (reply.status, reply.error["code"]) == (400, "tools_not_supported")
    assert server.post(CHAT, {**BODY, "tools": [WEATHER], "tool_choice": "none"}).status == 200


def test_a_form_that_is_not_known_is_not_read() -> None:
    form = form_of("{% if tools %}tools{% endif %}")
    assert form.takes_tools and form.syntax is None and not form.is_harmony
