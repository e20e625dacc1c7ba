"""Answers that LangChain gets from a server. Run in build/serving-clients: address, then JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Rome", "Oslo"]


def main(address: str) -> dict[str, Any]:
    common: dict[str, Any] = {"model": "bundle", "base_url": f"{address}/v1", "api_key": "none", "temperature": 0}
    chat = ChatOpenAI(max_tokens=24, max_retries=0, **common)
    longer = ChatOpenAI(max_tokens=150, max_retries=0, **common)
    by_items = ChatOpenAI(max_tokens=150, max_retries=0, use_responses_api=True, **common)
    asked = [HumanMessage("How many roses?")]
    item = by_items.bind_tools([Weather], tool_choice="Weather", strict=True).invoke(asked)
    result = ToolMessage("sunny", tool_call_id=item.tool_calls[0]["id"])
    called = longer.bind_tools([Weather], tool_choice="Weather", strict=True).invoke("How many roses?")
    return {
        "whole": chat.invoke("How many roses?").content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream("How many roses?")),
        "call": called.tool_calls[0]["args"],
        "item": item.tool_calls[0]["args"],
        "after": by_items.invoke([*asked, item, result]).text,
        "structured": longer.with_structured_output(Weather, method="json_schema", strict=True)
        .invoke("How many roses?")
        .city,
        "text": OpenAI(max_tokens=4, max_retries=0, **common).invoke("1 + 1"),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
