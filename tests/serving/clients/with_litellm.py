"""Answers that `litellm` gets by both APIs. Run in build/serving-clients: address, then JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

USER = {"role": "user", "content": "How many roses?"}


def main(address: str) -> dict[str, Any]:
    greedy: dict[str, Any] = {
        "messages": [USER],
        "temperature": 0,
        "max_tokens": 24,
        "api_key": "none",
        "max_retries": 0,
    }
    plain = {**greedy, "model": "openai/bundle", "api_base": f"{address}/v1"}
    whole = litellm.completion(**plain)
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **plain)]
    messages = litellm.completion(**{**greedy, "model": "anthropic/bundle", "api_base": address})
    text = litellm.text_completion(
        model="text-completion-openai/bundle",
        prompt="1 + 1",
        temperature=0,
        max_tokens=4,
        api_key="none",
        api_base=f"{address}/v1",
    )
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(pieces),
        "messages": messages.choices[0].message.content,
        "text": text.choices[0].text,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
