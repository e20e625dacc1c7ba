"""Answers that `openai` gets from a server. Run in build/serving-clients: address, then JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel, Field

from tests.serving.clients.weather import WEATHER

USER = {"role": "user", "content": "How many roses?"}


class Roses(BaseModel):
    """A structured answer. Its bounds end a number that the model would go on with for ever."""

    roses: int = Field(ge=0, le=99)


def main(address: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
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
    try:
        chat.create(messages=[USER], extra_body={"mirostat": 2}, **greedy)
        error = None
    except openai.BadRequestError as problem:
        error = [problem.code, problem.param]
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
        "error": error,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
