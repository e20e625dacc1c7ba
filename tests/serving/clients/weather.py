"""The one tool that tests and clients ask for. Standard library only, because clients run in their own environment."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
"""The tool in the form of chat completions."""
