"""The tenth turn of a conversation computes what is new since the ninth answer, while others ask, too."""

from __future__ import annotations

import pytest

from tests.serving.live_server import LiveServer

PATH = "/v1/chat/completions"
TURNS, MOST = 10, 1.2
QUESTIONS = [f"How many roses are {number} roses and {number + 3} more?" for number in range(2, 2 + TURNS)]


@pytest.mark.gate("G16")
def test_the_tenth_turn_computes_what_is_new(answering: LiveServer) -> None:
    messages: list[dict[str, str]] = []
    engine, held = answering.service.engine, 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        found = answering.post(PATH, {"messages": messages, "temperature": 0, "max_tokens": 8}).json
        usage = found["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        new = usage["prompt_tokens"] - held
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        held = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token is not computed
        other = answering.post("/v1/completions", {"prompt": f"{question} Ruth", "max_tokens": 2, "temperature": 0})
        assert other.status == 200
    assert engine.options.slots == 2 and usage["prompt_tokens"] > 10 * new
    assert computed <= MOST * new
