"""Calls of tools that `openai` gets from `/v1/responses`. Run in build/serving-clients: address, then JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.serving.clients.weather import FUNCTION

QUESTION = {"role": "user", "content": "How many roses?"}
TOOL: dict[str, Any] = {"type": "function", **FUNCTION, "strict": True}


def problem_of(call: Any) -> list[str | None]:
    """Return code and parameter of the error of a call."""
    try:
        call()
    except openai.BadRequestError as error:
        return [error.code, error.param]
    return []


def main(address: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    greedy: dict[str, Any] = {"model": "bundle", "temperature": 0, "max_output_tokens": 150}
    asked: dict[str, Any] = {"input": [QUESTION], "tools": [TOOL], "tool_choice": "required", **greedy}
    responses = client.responses
    whole = responses.create(**asked)
    Response.model_validate(whole.to_dict())
    call = whole.output[0]
    events = list(responses.create(stream=True, **asked))
    with responses.stream(**asked) as stream:
        final = stream.get_final_response()
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [QUESTION, *whole.output, result]
    plain = {**TOOL, "strict": False}
    told = list(responses.create(**{**greedy, "input": history, "tools": [plain], "stream": True}))
    for event in [*events, *told]:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    named = {"type": "function", "name": "weather"}
    return {
        "status": whole.status,
        "call": [call.type, call.name, json.loads(call.arguments), call.status],
        "ids": [call.id, call.call_id],
        "echo": [whole.tools[0].to_dict(), whole.tool_choice, whole.parallel_tool_calls],
        "kinds": [event.type for event in events],
        "streamed": "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta"),
        "parsed": final.output[0].parsed_arguments,
        "named": responses.create(**{**asked, "tool_choice": named}).tool_choice.to_dict(),
        "after": "".join(event.delta for event in told if event.type == "response.output_text.delta"),
        "built_in": problem_of(lambda: responses.create(input="a", tools=[{"type": "web_search"}], **greedy)),
        "no_result": problem_of(lambda: responses.create(input=history[:2], **greedy)),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
