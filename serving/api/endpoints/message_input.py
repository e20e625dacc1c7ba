"""The messages of Anthropic's API as messages of chat completions."""

from __future__ import annotations

from typing import Any

from ...tools.calls import json_text
from ..errors import RequestError, bad_field, shown
from ..fields import Fields
from .chat import message_text, read_message

_ROLES = ("user", "assistant")


def read_conversation(system: Any, given: Any, takes_tools: bool) -> list[dict[str, Any]]:
    """Return the system text and the messages of a body as a template gets them. Raises RequestError.

    takes_tools: whether messages may have calls of tools and their results.
    """
    if given is None:
        raise RequestError(400, "`messages` is missing", "messages", "missing_field")
    if not isinstance(given, list) or not given:
        raise bad_field("messages", f"must be a list with a message, found {shown(given)}")
    messages = list[dict[str, Any]]()
    for at, message in enumerate(given):
        messages += _read_message(message, f"messages[{at}]", takes_tools)
    if messages[-1]["role"] == "assistant":
        message = "ends with a message of the assistant, and this server cannot continue one"
        raise bad_field("messages", message, "unsupported_value")
    if system is None:
        return messages
    text = message_text(_without_marks(system), "system", ("text",))
    return [{"role": "system", "content": text}, *messages]


def _read_message(given: Any, place: str, takes_tools: bool) -> list[dict[str, Any]]:
    """Return one message as those of chat completions: first the results of tools, then the rest."""
    if not isinstance(given, dict):
        raise bad_field(place, f"must be an object, found {shown(given)}")
    if given.get("role") not in _ROLES:
        message = f"must be {' or '.join(_ROLES)}, found {shown(given.get('role'))}; `system` is a field of its own"
        raise bad_field(f"{place}.role", message, "unsupported_value")
    if not isinstance(given.get("content"), list):
        return [read_message(given, place, takes_tools)]
    rest, calls, thoughts, results = list[Any](), list[Any](), list[str](), list[dict[str, Any]]()
    for at, block in enumerate(_without_marks(given["content"])):
        kind, where = block.get("type") if isinstance(block, dict) else None, f"{place}.content[{at}]"
        if kind not in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
            rest.append(block)  # of text, or of a kind that is not known
            continue
        fields = Fields(block, f"{where}.")
        fields.take("type")
        if kind == "tool_use":
            name, value = fields.text("name"), fields.take("input")
            if value is not None and not isinstance(value, dict):
                raise bad_field(f"{where}.input", f"must be an object, found {shown(value)}")
            function = {"name": name, "arguments": json_text(value or {})}
            calls.append({"id": fields.text("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = fields.take("content")
            text = "" if content is None else message_text(_without_marks(content), f"{where}.content", ("text",))
            result = {"role": "tool", "tool_call_id": fields.text("tool_use_id"), "content": text}
            results.append(result)
            fields.flag("is_error")  # the text of the result says so
        elif kind == "thinking":
            thoughts.append(fields.text("thinking") or "")
            fields.without_effect("signature")
        else:
            fields.without_effect("data")  # a text that only its publisher can read
        fields.end()
    plain = {**given, "content": rest}
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    results = [read_message(result, f"{place}.content", takes_tools) for result in results]
    plain = read_message(plain, place, takes_tools)
    return [*results, plain] if rest or calls or not results else results


def _without_marks(content: Any) -> Any:
    """Return content whose parts have no `cache_control`, which has no effect here."""
    if not isinstance(content, list):
        return content
    return [
        {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
        for part in content
    ]
