"""What a stream tells apart from its text: comments while it waits, and the tokens that belong to the text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moec.runtime import Engine
from moec.serving.api.service import ServiceOptions
from moec.serving.engine.scheduler import ServingOptions
from tests.serving.clients.weather import WEATHER
from tests.serving.live_server import LiveServer, live_server

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ROSES = {"role": "user", "content": "Question: Ruth had 79 roses, lost 70 and then got 9. How many has she?\nAnswer:"}
ASKED: dict[str, Any] = {"messages": [ROSES], "temperature": 0, "max_tokens": 120}
LONG: dict[str, Any] = {"prompt": "word", "max_tokens": 90, "temperature": 0, "logit_bias": {"2": -100}}


@pytest.fixture
def impatient(engine: Engine) -> Iterator[LiveServer]:
    """A server that tells almost at once that a stream waits, and computes prompts token by token next to answers."""
    options = ServiceOptions("tiny", deadline_s=60, ping_s=0.0005)
    with live_server(engine, ServingOptions(prefill_tokens=1), options) as running:
        yield running


def comments(body: bytes) -> list[str]:
    """Return the comments of a stream."""
    return [line[2:] for line in body.decode().splitlines() if line.startswith(": ")]


def test_a_stream_tells_its_place_in_the_queue_and_that_its_prompt_is_computed(impatient: LiveServer) -> None:
    others = [threading.Thread(target=impatient.post, args=(COMPLETIONS, {**LONG, "seed": at})) for at in range(6)]
    for each in others:
        each.start()
    while impatient.scheduler.waiting < 2:
        pass
    reply = impatient.post(COMPLETIONS, {"prompt": [9] * 80, "max_tokens": 4, "temperature": 0, "stream": True})
    for each in others:
        each.join()
    told = comments(reply.body)
    assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")
    assert any(each.startswith("queue ") for each in told) and "prefill" in told
    first = reply.body.index(b"data: ")
    assert b": prefill" not in reply.body[first:] and b": queue" not in reply.body[first:]


def test_text_that_is_held_back_is_not_told_as_a_prompt(answering: LiveServer) -> None:
    """A forced call is told whole, so that its tokens make no pieces."""
    pytest.importorskip("llguidance")
    body = {**ASKED, "tools": [WEATHER], "tool_choice": "required", "stream": True}
    reply = answering.post(CHAT, body)
    assert reply.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert comments(reply.body) == []


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stop", [None, "roses", "9 ro", "\n##"], ids=str)
def test_log_probabilities_of_a_chat_are_those_of_its_text(
    answering: LiveServer, stop: str | None, streams: bool
) -> None:
    """Neither the end token nor tokens of a stop text. The last token may go on after the text."""
    body = {**ASKED, "logprobs": True, "stop": stop, "stream": streams}
    reply = answering.post(CHAT, body)
    choices = [event["choices"][0] for event in reply.events] if streams else reply.json["choices"]
    text = "".join(choice["delta" if streams else "message"].get("content", "") for choice in choices)
    entries = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    told = b"".join(bytes(each["bytes"]) for each in entries).decode()
    assert choices[-1]["finish_reason"] == "stop" and (stop is None or stop not in text)
    assert told.startswith(text) and len(told) - len(text) < len(entries[-1]["token"])
    assert stop is not None or told == text


def test_log_probabilities_of_a_cut_answer_are_all_there(answering: LiveServer) -> None:
    body = {**ASKED, "logprobs": True, "max_tokens": 7, "stop": "never to be seen"}
    choice = answering.post(CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["logprobs"]["content"]) == 7


def test_completions_tell_the_end_token_too(answering: LiveServer) -> None:
    """Clients of this older form read the last entry as that of the last token."""
    choice = answering.post(
        COMPLETIONS, {"prompt": ROSES["content"], "temperature": 0, "max_tokens": 99, "logprobs": 0}
    )
    tokens = choice.json["choices"][0]["logprobs"]["tokens"]
    assert tokens[-1] == "</s>" and len(tokens) == choice.json["usage"]["completion_tokens"]


@pytest.mark.parametrize("stop", ["n\u00e9e", "\U0001f642", "\u65e5"])
def test_characters_of_several_tokens_arrive_whole(answering: LiveServer, stop: str) -> None:
    """The grammar makes the text. Stop texts end it inside of characters' tokens."""
    pytest.importorskip("llguidance")
    text = "\U0001f642 n\u00e9e \u65e5\u672c"
    schema = {"type": "object", "properties": {"s": {"enum": [text]}}, "required": ["s"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {**ASKED, "max_tokens": 200, "response_format": form, "stream": True, "n": 2}
    answers = {0: "", 1: ""}
    for event in answering.post(CHAT, body).events:
        for choice in event["choices"]:
            answers[choice["index"]] += choice["delta"].get("content", "")
    assert answers[0] == answers[1] and f'"{text}"' in answers[0]
    cut = "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in answering.post(CHAT, {**body, "n": 1, "stop": stop}).events
    )
    assert answers[0].startswith(cut) and cut == answers[0][: answers[0].index(stop)]
