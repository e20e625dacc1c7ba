"""Calls of tools: the forms in which chat templates write them, and how they are read back.

Sources: the chat templates that the models' publishers ship with their tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its arguments."""
ParseCalls: TypeAlias = Callable[[str, Parameters], "list[ToolCall] | None"]
"""Reads the calls in the text between the marks; None if it has none."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolsOfRequest:
    """The tools of a request, and whether it wants calls.

    described: the tools as the template gets them, in the form of OpenAI.
    parameters: JSON schema of each tool's arguments.
    forced: names of the tools of which the answer must call one; empty if it may do without.
    is_parallel: whether an answer may have several calls.
    """

    described: tuple[dict[str, Any], ...] = ()
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    forced: tuple[str, ...] = ()
    is_parallel: bool = True


NO_TOOLS = ToolsOfRequest()


def call_of(value: Any) -> ToolCall | None:
    """Return the call in an object with `name` and `arguments` (or `parameters`); None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else json_text(arguments))


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def parsed(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def typed(text: str, name: str, key: str, parameters: Parameters) -> Any:
    """Return the value of an argument that was written as plain text. A text stays one if the schema wants one."""
    properties = parameters.get(name, {}).get("properties")
    described = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(described, dict) and described.get("type") == "string":
        return text
    value = parsed(text)
    return text if value is None and text.strip() != "null" else value


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """The form of calls in one kind of template.

    name: a word for messages.
    sign: text of a template that has this form.
    begin, end: marks around calls. An empty end: calls go on to the end of the answer.
    parse: reads what is between the marks.
    forced: text around the JSON of a call that must be made, and whether this JSON is a list; None if it has no JSON.
    id_characters: length of the identifier of a call; 0 for any.
    inner: marks inside of calls.
    """

    name: str
    sign: str
    begin: str
    end: str
    parse: ParseCalls
    forced: tuple[str, str, bool] | None = None
    id_characters: int = 0
    inner: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, some of which may be special tokens."""
        return tuple(mark for mark in (self.begin, self.end, *self.inner) if mark)


def _one_object(text: str, parameters: Parameters) -> list[ToolCall] | None:
    call = call_of(parsed(text))
    return None if call is None else [call]


def _list_of_objects(text: str, parameters: Parameters) -> list[ToolCall] | None:
    value = parsed(text)
    calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
    sound = [call for call in calls if call is not None]
    return sound if sound and len(sound) == len(calls) else None


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _key_value_tags(text: str, parameters: Parameters) -> list[ToolCall] | None:
    """Read the form of GLM: a name, then pairs of `<arg_key>` and `<arg_value>`."""
    name = text.partition("<arg_key>")[0].strip()
    if not name or "\n" in name:
        return None
    values = {key.strip(): typed(value, name, key.strip(), parameters) for key, value in _ARGUMENT.findall(text)}
    return [ToolCall(name, json_text(values))]


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _function_tags(text: str, parameters: Parameters) -> list[ToolCall] | None:
    """Read the form of Qwen3-Coder: `<function=NAME>` around `<parameter=KEY>`."""
    calls = []
    for name, body in _FUNCTION.findall(text):
        values = {key: typed(value, name, key, parameters) for key, value in _PARAMETER.findall(body)}
        calls.append(ToolCall(name.strip(), json_text(values)))
    return calls or None


_DEEPSEEK_CALL = re.compile(
    "<\uff5ctool\u2581call\u2581begin\uff5c>(.*?)<\uff5ctool\u2581sep\uff5c>(.*?)(?:<\uff5ctool\u2581call\u2581end\uff5c>|$)",
    re.DOTALL,
)
_FENCED = re.compile(r"^(.*?)\n```json\n(.*?)\n```\s*$", re.DOTALL)


def _deepseek(text: str, parameters: Parameters) -> list[ToolCall] | None:
    """Read the forms of DeepSeek V3 and R1 (a kind, a name, a fenced block) and of V3.1 (a name, JSON)."""
    calls = []
    for before, after in _DEEPSEEK_CALL.findall(text):
        fenced = _FENCED.match(after)
        name, arguments = (before, after) if fenced is None else fenced.groups()
        if parsed(arguments) is None:
            return None
        calls.append(ToolCall(name.strip(), arguments.strip()))
    return calls or None


SYNTAXES: tuple[ToolSyntax, ...] = (
    ToolSyntax("GLM", "<arg_key>", "<tool_call>", "</tool_call>", _key_value_tags),
    ToolSyntax("Qwen3-Coder", "<function=", "<tool_call>", "</tool_call>", _function_tags),
    ToolSyntax(
        "Hermes",
        "<tool_call>",
        "<tool_call>",
        "</tool_call>",
        _one_object,
        ("<tool_call>\n", "\n</tool_call>", False),
    ),
    ToolSyntax("Mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", _list_of_objects, ("[TOOL_CALLS]", "", True), 9),
    ToolSyntax("Granite", "<|tool_call|>", "<|tool_call|>", "", _list_of_objects, ("<|tool_call|>", "", True)),
    ToolSyntax(
        "DeepSeek",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        _deepseek,
        inner=(
            "<\uff5ctool\u2581call\u2581begin\uff5c>",
            "<\uff5ctool\u2581sep\uff5c>",
            "<\uff5ctool\u2581call\u2581end\uff5c>",
        ),
    ),
)
"""In the order in which a template is searched. The first two use the marks of the third."""


def is_in(text: str, files: Sequence[bytes]) -> bool:
    """Return whether files of a template have a text, plain or as JSON writes it."""
    written = (text.encode(), json.dumps(text)[1:-1].encode())
    return any(form in data for data in files for form in written)


def syntax_of(files: Sequence[bytes]) -> ToolSyntax | None:
    """Return the form of calls in a template; None if it takes no tools, or writes calls in another form."""
    if not takes_tools(files):
        return None
    return next((syntax for syntax in SYNTAXES if is_in(syntax.sign, files)), None)


def takes_tools(files: Sequence[bytes]) -> bool:
    return is_in("tools", files)
