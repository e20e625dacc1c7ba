"""`/v1/completions` over a real connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from moec.runtime import Engine, load
from moec.runtime.text.sampling import SamplingOptions
from moec.serving.api.errors import RequestError
from tests.serving.live_server import LiveServer, live_server

PROMPT, PATH = "Question: what is", "/v1/completions"
GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


def expected(engine: Engine, prompt: str = PROMPT, count: int = 12, **options: Any) -> str:
    steps = engine.generate(prompt, count, SamplingOptions(**options))
    return "".join(step.text for step in steps)


def test_the_answer_is_that_of_the_engine(server: LiveServer, engine: Engine) -> None:
    found = server.post(PATH, GREEDY).json
    assert found["choices"][0]["text"] == expected(engine)
    assert (found["object"], found["model"]) == ("text_completion", "tiny")
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["timings"]["hit_rate"] < 1 and found["timings"]["bytes_read"] > 0


def test_a_stream_has_the_same_text_and_one_reason_at_its_end(server: LiveServer, engine: Engine) -> None:
    reply = server.post(PATH, {**GREEDY, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    *pieces, usage = reply.events
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected(engine)
    reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
    assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) == {None}
    assert all(piece["usage"] is None for piece in pieces)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    assert pieces[-1]["timings"]["ttft_ms"] > 0


def test_token_ids_and_lists_of_prompts(server: LiveServer, engine: Engine) -> None:
    ids = engine.encode(PROMPT)
    assert server.post(PATH, {**GREEDY, "prompt": ids}).json["choices"][0]["text"] == expected(engine)
    both = server.post(PATH, {**GREEDY, "prompt": [PROMPT, "Another"], "n": 2}).json
    texts = [choice["text"] for choice in both["choices"]]
    assert texts == [expected(engine)] * 2 + [expected(engine, "Another")] * 2
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert server.post(PATH, {**GREEDY, "prompt": [ids, ids]}).json["usage"]["prompt_tokens"] == 2 * len(ids)


def test_a_seed_gives_one_answer_and_each_of_n_its_own(server: LiveServer, engine: Engine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 5, "top_p": 0.9, "n": 3}
    first, second = (server.post(PATH, body).json["choices"] for _ in range(2))
    assert first == second
    assert first[1]["text"] == expected(engine, count=8, temperature=1.0, top_p=0.9, seed=6)
    assert len({choice["text"] for choice in first}) > 1


def test_echo_scores_the_prompt_as_the_engine_does(server: LiveServer, engine: Engine) -> None:
    """What lm-evaluation-harness asks for: ids, echo, one log probability, one token."""
    ids = engine.encode(PROMPT)
    body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choice = server.post(PATH, body).json["choices"][0]
    log_probs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert log_probs["token_logprobs"][0] is None and len(log_probs["tokens"]) == len(ids) + 1
    logits = engine.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = [rows[at, token] for at, token in enumerate(ids[1:])]
    assert log_probs["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-5)
    for at, top in enumerate(log_probs["top_logprobs"][1:-1]):
        is_likeliest = int(rows[at].argmax()) == ids[at + 1]
        assert (max(top, key=top.get) == log_probs["tokens"][at + 1]) == is_likeliest
    assert log_probs["text_offset"][:2] == [0, len(log_probs["tokens"][0])]
    streamed = server.post(PATH, {**body, "stream": True}).events
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    assert [each for part in parts if part for each in part["tokens"]] == log_probs["tokens"]
    assert server.post(PATH, {**body, "max_tokens": 0}).json["choices"][0]["text"] == PROMPT


def test_bytes_and_offsets_of_tokens_outside_of_ascii(server: LiveServer, engine: Engine) -> None:
    text = "caf\u00e9 \U0001f642 \u20ac5"
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    data = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert b"".join(data).decode() == text and b"\xf0" in data
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 0, "echo": True}
    log_probs = server.post(PATH, body).json["choices"][0]["logprobs"]
    starts = [sum((byte & 0xC0) != 0x80 for byte in b"".join(data[:at])) for at in range(len(data))]
    is_begun = [each[0] & 0xC0 == 0x80 for each in data]  # the character began in the token before
    wanted = [start - begun for start, begun in zip(starts, is_begun, strict=True)]
    assert log_probs["text_offset"][:-1] == wanted
    assert "\\xf0" in log_probs["tokens"]


@pytest.mark.gate("G16")
def test_log_probabilities_have_a_limit(server: LiveServer) -> None:
    """Of one request, and of all that are open."""
    body = {"prompt": [[5] * 80] * 18, "max_tokens": 1, "logprobs": 20, "echo": True}
    reply = server.post(PATH, body)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "logprobs", "invalid_value")
    small = {**body, "prompt": [[5] * 80], "temperature": 0}
    memory = server.service.log_probs
    others = memory.limit_bytes - 1000
    memory.hold(others)
    refused = server.post(PATH, small)
    assert (refused.status, refused.error["code"]) == (429, "log_probs_full") and refused.headers["retry-after"]
    memory.release(others)
    for streams in (False, True):
        assert server.post(PATH, {**small, "stream": streams}).status == 200
    server.wait_until_idle()
    assert memory.held_bytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 0.8, "top_p": 0.3},
        {"temperature": 0.8, "min_p": 0.4},
        {"temperature": 0, "repetition_penalty": 1.9},
        {"temperature": 0, "presence_penalty": 1.9},
        {"temperature": 0, "frequency_penalty": 1.9},
        {"temperature": 0, "logit_bias": {"7": 100, "9": -100}},
    ],
    ids=str,
)
def test_each_field_of_sampling_reaches_the_engine(server: LiveServer, engine: Engine, options: dict[str, Any]) -> None:
    biases = tuple((int(token), float(bias)) for token, bias in options.get("logit_bias", {}).items())
    given = {name: value for name, value in options.items() if name != "logit_bias"}
    choice = server.post(PATH, {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **options}).json["choices"][0]
    assert choice["text"] == expected(engine, seed=3, logit_bias=biases, **given)


def test_stop_texts_are_left_out(server: LiveServer, engine: Engine) -> None:
    whole = expected(engine)
    stop = whole[4:6]
    for given in (stop, ["unseen", stop]):
        choice = server.post(PATH, {**GREEDY, "stop": given}).json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")


WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "missing_field"),
    ({"prompt": 5}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "InputError"),
    ({"prompt": [[1, True]]}, "prompt", "invalid_value"),
    ({"prompt": [10**9]}, "prompt", "InputError"),
    ({"prompt": [-1]}, "prompt", "InputError"),
    ({"prompt": [7] * 97}, "prompt", "context_length_exceeded"),
    ({"prompt": "\ud800"}, "prompt", "InputError"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"logprobs": 99}, "logprobs", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"best_of": 3}, "best_of", "unsupported_value"),
    ({"suffix": "x"}, "suffix", "unsupported_value"),
    ({"stream": 1}, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", "unknown_field"),
    ({"mirostat": 2}, "mirostat", "unknown_field"),
]


@pytest.mark.parametrize(("change", "param", "code"), WRONG, ids=[str(change)[:40] for change, _, _ in WRONG])
def test_wrong_fields_are_named(server: LiveServer, change: dict[str, Any], param: str | None, code: str) -> None:
    reply = server.post(PATH, {**GREEDY, **change})
    assert reply.status == 400, reply.body
    assert (reply.error["param"], reply.error["code"]) == (param, code)
    assert set(reply.error) == {"message", "type", "param", "code"}


def test_a_value_that_is_not_supported_is_told_with_those_that_are(server: LiveServer) -> None:
    message = server.post(PATH, {**GREEDY, "best_of": 3}).error["message"]
    assert message.endswith("it can be 1")
    digits = server.post(PATH, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}").error["message"]
    assert "more than 4000 digits" in digits


LONG_NUMBER, LONG_TEXT = 10**3999, "x" * 5000
TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: tokens}) for path, name in ((PATH, "prompt"), ("/detokenize", "tokens"))
      for tokens in ([LONG_NUMBER], [-LONG_NUMBER], [LONG_TEXT])),
    (PATH, {"prompt": [[5, LONG_NUMBER]]}),
    *((PATH, {**GREEDY, name: value}) for name in ("max_tokens", "seed", "top_k", "temperature", "n", "stream")
      for value in (LONG_NUMBER, LONG_TEXT)),
    (PATH, {**GREEDY, "logit_bias": {str(LONG_NUMBER): 1}}),
    (PATH, {**GREEDY, LONG_TEXT: 1}),
    (PATH, {**GREEDY, "stream": True, "stream_options": {LONG_TEXT: 1}}),
    ("/v1/chat/completions", {"messages": [{"role": LONG_TEXT, "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": LONG_TEXT}}),
    ("/v1/responses", {"input": [{"type": LONG_TEXT}]}),
]  # fmt: skip


@pytest.mark.gate("G10")
@pytest.mark.parametrize(("path", "body"), TOO_LONG, ids=[str(at) for at in range(len(TOO_LONG))])
def test_no_message_repeats_a_long_value(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, body)
    assert reply.status == 400 and len(reply.body) < 500, reply.body


def test_a_message_that_others_wrote_is_cut() -> None:
    assert len(RequestError(400, LONG_TEXT).message) < 1100


def test_fields_without_effect_are_accepted(server: LiveServer, engine: Engine) -> None:
    more = {"user": "me", "metadata": {"a": 1}, "store": True, "best_of": 1, "suffix": None, "stop": None}
    assert server.post(PATH, {**GREEDY, **more}).json["choices"][0]["text"] == expected(engine)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"prompt": "a", "prompt": "b"}', b"1e999"]
)
def test_bodies_that_are_no_objects(server: LiveServer, data: bytes) -> None:
    reply = server.post(PATH, data)
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")


def test_paths_and_methods(server: LiveServer) -> None:
    assert server.ask("GET", "/v1/nothing").status == 404
    assert server.ask("GET", PATH).status == 405
    assert server.ask("POST", f"{PATH}/", b"{}").status == 404, "no redirect to another address"
    assert server.ask("GET", "/v1/models").json["data"][0]["id"] == "tiny"
    assert server.ask("GET", "/v1/models/tiny").json["id"] == "tiny"


@pytest.mark.parametrize("name", ["tiny", "gpt-4o", "a/b", "\u00e9"])
def test_every_name_stands_for_the_one_model(server: LiveServer, name: str) -> None:
    """Clients send a name of their own. Answers have that of the bundle."""
    user, few = [{"role": "user", "content": "hi"}], {"max_tokens": 1}
    found = [
        server.ask("GET", f"/v1/models/{quote(name)}"),
        server.post(PATH, {**GREEDY, **few, "model": name}),
        server.post("/v1/chat/completions", {"messages": user, **few, "model": name}),
        server.post("/v1/responses", {"input": "hi", "max_output_tokens": 1, "model": name}),
        server.post("/v1/messages", {"messages": user, **few, "model": name}),
    ]
    assert [reply.json.get("model", reply.json.get("id")) for reply in found] == ["tiny"] * 5
    assert server.post("/tokenize", {"content": "a", "model": name}).status == 200
    for path in (PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"):
        body = {"messages": user, "prompt": "a", "input": "a", "content": "a", "tokens": [5], "model": 5}
        assert server.post(path, body).status == 400
    assert server.ask("GET", "/health").json["status"] == "ok"
    props = server.ask("GET", "/props").json
    assert props["mode"].startswith("streaming, exact") and props["slots"] == 3
    assert props["verdict"] == "", "the bundle was compiled without a target"
    assert props["is_exact"] is True and props["answers_depend_on_other_requests"] is False
    assert server.ask("GET", "/ready").json == server.ask("GET", "/health").json
    info = server.ask("GET", "/tokenizer_info").json
    assert "[{{ m.role }}]" in info["chat_template"] and info["eos_token"]


def test_a_lossy_run_says_so(tiny_bundle: Path) -> None:
    options = {"expert_cache": "60%", "context": 96, "lossy": "big-little gamma=0.9,k=1"}
    with load(tiny_bundle, **options) as lossy, live_server(lossy) as server:
        props = server.ask("GET", "/props").json
    assert (props["is_exact"], props["answers_depend_on_other_requests"]) == (False, True)
    assert "LOSSY" in props["mode"]
