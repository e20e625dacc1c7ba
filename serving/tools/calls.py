"""A call of a tool, the tools of a request, and values that models write without types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: a JSON text."""

    name: str
    arguments: str


Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its arguments."""


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
    """Return a value as JSON."""
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
