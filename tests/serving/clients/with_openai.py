"""Answers that `openai` gets by its two APIs. Run in build/serving-clients: address, then JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.serving.clients.weather import FUNCTION, WEATHER

USER = {"role": "user", "content": "How many roses?"}
TOOL: dict[str, Any] = {"type": "function", **FUNCTION, "strict": True}


class Roses(BaseModel):
    """A structured answer. Its bounds end a number that the model would go on with for ever."""

    roses: int = Field(ge=0, le=99)


def problem_of(call: Any) -> list[str | None]:
    """Return code and parameter of the error of a call."""
    try:
        call()
    except openai.BadRequestError as error:
        return [error.code, error.param]
    return []


def chat_answers(client: openai.OpenAI) -> dict[str, Any]:
    model = client.models.list().data[0].id
    greedy: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24}
    chat = client.chat.completions
    whole = chat.create(messages=[USER], **greedy)
    streamed, usage = "", None
    for chunk in chat.create(messages=[USER], stream=True, stream_options={"include_usage": True}, **greedy):
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    scored = client.completions.create(model=model, prompt="1 + 1", max_tokens=1, temperature=0, echo=True, logprobs=1)
    longer = {**greedy, "max_tokens": 150}
    parsed = chat.parse(messages=[USER], response_format=Roses, **longer)
    called = chat.create(messages=[USER], tools=[WEATHER], tool_choice="required", **longer).choices[0]
    call = called.message.tool_calls[0]
    history = [
        USER,
        called.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = chat.create(messages=history, tools=[WEATHER], **greedy)
    with chat.stream(messages=[USER], tools=[WEATHER], tool_choice="required", **longer) as stream:
        final = stream.get_final_completion().choices[0]
    response = client.responses.create(model=model, input="How many roses?", temperature=0, max_output_tokens=24)
    return {
        "model": model,
        "whole": whole.choices[0].message.content,
        "streamed": streamed,
        "usage": usage is not None and usage.completion_tokens,
        "scored": len(scored.choices[0].logprobs.token_logprobs),
        "parsed": type(parsed.choices[0].message.parsed.roses).__name__,
        "call": [called.finish_reason, call.function.name, json.loads(call.function.arguments)],
        "after": after.choices[0].finish_reason,
        "streamed_call": json.loads(final.message.tool_calls[0].function.arguments),
        "response": response.output_text,
        "error": problem_of(lambda: chat.create(messages=[USER], extra_body={"mirostat": 2}, **greedy)),
    }


def response_answers(client: openai.OpenAI) -> dict[str, Any]:
    greedy: dict[str, Any] = {"model": "bundle", "temperature": 0, "max_output_tokens": 150}
    asked: dict[str, Any] = {"input": [USER], "tools": [TOOL], "tool_choice": "required", **greedy}
    responses = client.responses
    whole = responses.create(**asked)
    Response.model_validate(whole.to_dict())
    call = whole.output[0]
    events = list(responses.create(stream=True, **asked))
    with responses.stream(**asked) as stream:
        final = stream.get_final_response()
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [USER, *whole.output, result]
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


def main(address: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    return {"chat": chat_answers(client), "responses": response_answers(client)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
