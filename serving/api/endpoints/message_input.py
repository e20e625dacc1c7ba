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
    found = list[dict[str, Any]]()
    for at, message in enumerate(given):
        found += _read_message(message, f"messages[{at}]", takes_tools)
    if found[-1]["role"] == "assistant":
        message = "ends with a message of the assistant, and this server cannot continue one"
        raise bad_field("messages", message, "unsupported_value")
    if system is None:
        return found
    text = message_text(_without_marks(system), "system", ("text",))
    return [{"role": "system", "content": text}, *found]


def _read_message(given: Any, place: str, takes_tools: bool) -> list[dict[str, Any]]:
    """Return one message as those of chat completions: first the results of tools, then the rest."""
    if not isinstance(given, dict):
        raise bad_field(place, f"must be an object, found {shown(given)}")
    if given.get("role") not in _ROLES:
        message = f"must be {' or '.join(_ROLES)}, found {shown(given.get('role'))}; `system` is a field of its own"
        raise bad_field(f"{place}.role", message, "unsupported_value")
    if not isinstance(given.get("content"), list):
        return [read_message(given, place, takes_tools)]
    blocks = _Blocks()
    for at, part in enumerate(_without_marks(given["content"])):
        blocks.add(part, f"{place}.content[{at}]")
    plain = {**given, "content": blocks.rest}
    if blocks.calls:
        plain["tool_calls"] = blocks.calls
    if blocks.thoughts:
        plain["reasoning_content"] = "".join(blocks.thoughts)
    results = [read_message(each, f"{place}.content", takes_tools) for each in blocks.results]
    own = read_message(plain, place, takes_tools)
    return [*results, own] if blocks.rest or blocks.calls or not results else results


class _Blocks:
    """The parts of one message.

    rest: parts of text, and those that are not known.
    calls, results: calls of tools and their results, in the form of OpenAI.
    thoughts: texts of thinking.
    """

    def __init__(self) -> None:
        self.rest, self.calls, self.results = list[Any](), list[Any](), list[dict[str, Any]]()
        self.thoughts = list[str]()

    def add(self, part: Any, place: str) -> None:
        """Take a part. Raises RequestError."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
            self.rest.append(part)
            return
        fields = Fields(part, f"{place}.")
        fields.take("type")
        if kind == "tool_use":
            name = fields.text("name")
            value = fields.take("input")
            if value is not None and not isinstance(value, dict):
                raise bad_field(f"{place}.input", f"must be an object, found {shown(value)}")
            function = {"name": name, "arguments": json_text(value or {})}
            self.calls.append({"id": fields.text("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = fields.take("content")
            text = "" if content is None else message_text(_without_marks(content), f"{place}.content", ("text",))
            self.results.append({"role": "tool", "tool_call_id": fields.text("tool_use_id"), "content": text})
            fields.flag("is_error")  # the text of the result says so
        elif kind == "thinking":
            self.thoughts.append(fields.text("thinking") or "")
            fields.without_effect("signature")
        else:
            fields.without_effect("data")  # a text that only its publisher can read
        fields.end()


def _without_marks(content: Any) -> Any:
    """Return content whose parts have no `cache_control`, which has no effect here."""
    if not isinstance(content, list):
        return content
    return [
        {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
        for part in content
    ]
