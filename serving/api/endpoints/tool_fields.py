"""Fields about tools: `tools`, `tool_choice`, and calls in the messages of a conversation."""

from __future__ import annotations

import re
import secrets
from typing import Any

from ...tools.calls import NO_TOOLS, ToolCall, ToolsOfRequest, parsed
from ..errors import RequestError, bad_field, shown
from ..fields import Fields
from ..service import Service

MAX_TOOLS, MAX_CALL_CHARACTERS = 128, 256
"""Most tools of a request, and most characters of the name or the identifier of an earlier call."""
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DEFAULT_ID_CHARACTERS = 24


def read_tools(fields: Fields, service: Service) -> ToolsOfRequest:
    """Return the tools of a body in the form of chat completions. Raises RequestError."""
    fields.unsupported("functions", [])
    fields.unsupported("function_call", "none", "auto")
    given, choice = fields.take("tools"), fields.take("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls", True)
    if given is not None and not isinstance(given, list):
        raise bad_field("tools", f"must be a list, found {shown(given)}")
    if given and len(given) > MAX_TOOLS:
        raise bad_field("tools", f"has {len(given)} tools, more than {MAX_TOOLS}")
    described = [_read_tool(tool, f"tools[{at}]") for at, tool in enumerate(given or ())]
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in described}
    forced = _forced(choice, parameters)
    if not described or choice == "none":
        return NO_TOOLS
    if not forced and any(tool["function"].pop("strict", False) for tool in described):
        raise bad_field("tools", "can be `strict` only where `tool_choice` asks for a call", "unsupported_value")
    require_tools(service, bool(forced))
    return ToolsOfRequest(tuple(described), parameters, forced, is_parallel)


def tool_fields(given: Any, place: str) -> Fields:
    """Return the fields of a tool of the type `function`, without its type. Raises RequestError."""
    if not isinstance(given, dict):
        raise bad_field(place, f"must be an object, found {shown(given)}")
    fields = Fields(given, f"{place}.")
    kind = fields.text("type")
    if kind != "function":
        raise bad_field(f"{place}.type", f"must be function, found {shown(kind)}", "unsupported_value")
    return fields


def _read_tool(given: Any, place: str) -> dict[str, Any]:
    fields = tool_fields(given, place)
    function = fields.object("function")
    if function is None:
        raise RequestError(400, f"`{place}.function` is missing", place, "missing_field")
    fields.end()
    return read_function(function, "parameters")


def named_choice(name: str | None) -> dict[str, Any]:
    """Return the `tool_choice` that asks for one tool, in the form of chat completions."""
    return {"type": "function", "function": {"name": name}}


def read_function(function: Fields, schema_name: str) -> dict[str, Any]:
    """Return a tool with its name, description and parameters, in the form of chat completions. Raises RequestError.

    schema_name: field of the schema.
    """
    name, schema = function.text("name"), function.take(schema_name)
    if name is None or not _NAME.fullmatch(name):
        raise bad_field(f"{function.place}name", f"must be 1 to 64 letters, digits, `_`, `.`, `-`, found {shown(name)}")
    if schema is not None and not isinstance(schema, dict):
        raise bad_field(f"{function.place}{schema_name}", f"must be a JSON schema, found {shown(schema)}")
    described: dict[str, Any] = {"name": name, "description": function.text("description", "")}
    described["parameters"] = {"type": "object", "properties": {}} if schema is None else schema
    if function.flag("strict"):
        described["strict"] = True
    function.end()
    return {"type": "function", "function": described}


def _forced(choice: Any, parameters: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of tools that `tool_choice` asks for; empty if the model may choose. Raises RequestError."""
    if choice is None or choice in ("none", "auto"):
        return ()
    names = tuple(parameters)
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bad_field("tool_choice", "must be none, auto, required, or name a function", "unsupported_value")
        names = (name,) if name in parameters else ()
    if not names:
        raise bad_field("tool_choice", "asks for a tool that `tools` does not have")
    return names


def require_tools(service: Service, is_forced: bool) -> None:
    """Refuse tools that the bundle's template does not take, or whose calls cannot be read. Raises RequestError."""
    chat_form = service.chat_form
    if not chat_form.takes_tools:
        raise no_tools("tools")
    if chat_form.syntax is None and not chat_form.is_harmony:
        message = "the chat template of this bundle writes calls of tools in a form that this server cannot read"
        raise RequestError(400, message, "tools", "tools_not_supported")
    if is_forced and (chat_form.syntax is None or chat_form.syntax.forced is None):
        message = "cannot ask for a call with this bundle, because its calls are not written as JSON"
        raise bad_field("tool_choice", message, "unsupported_value")


def no_tools(param: str) -> RequestError:
    return RequestError(400, "this bundle has no chat template that takes tools", param, "tools_not_supported")


def new_call_id(service: Service) -> str:
    """Return an identifier for a call, with the length that the template wants."""
    syntax = service.chat_form.syntax
    size = (syntax.id_characters if syntax is not None else 0) or _DEFAULT_ID_CHARACTERS
    return secrets.token_hex(size)[:size]


def plain_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """Return a call in the form of OpenAI."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def read_calls(given: Any, place: str) -> list[dict[str, Any]]:
    """Return the calls in a message of the assistant, with arguments as an object. Raises RequestError."""
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise bad_field(place, f"must be a list of at most {MAX_TOOLS} calls")
    calls = []
    for at, call in enumerate(given):
        where = f"{place}[{at}]"
        if not isinstance(call, dict):
            raise bad_field(where, f"must be an object, found {shown(call)}")
        fields = Fields(call, f"{where}.")
        call_id, function = fields.text("id", most=MAX_CALL_CHARACTERS), fields.object("function")
        fields.unsupported("type", "function")
        fields.without_effect("index")
        fields.end()
        if function is None:
            raise bad_field(where, "must have a `function` with a `name` and `arguments`")
        calls.append(read_call(function, call_id or ""))
    return calls


def read_call(function: Fields, call_id: str) -> dict[str, Any]:
    """Return an earlier call as a template gets it. function: its `name` and `arguments`. Raises RequestError."""
    name, arguments = function.text("name", most=MAX_CALL_CHARACTERS), function.text("arguments", "{}") or ""
    if name is None:
        raise RequestError(400, f"`{function.place}name` is missing", f"{function.place}name", "missing_field")
    function.end()
    value = parsed(arguments) if arguments.strip() else {}
    if not isinstance(value, dict):
        raise bad_field(f"{function.place}arguments", "must be an object as a JSON text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}
