"""`response_format`: answers are JSON that follows a schema, and other answers keep their bits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moec.manifests.errors import InputError
from moec.runtime import Engine
from moec.runtime.text.tokenizer import TokenBytes
from moec.serving.api.errors import error_of_failure
from moec.serving.engine.scheduler import Scheduler
from moec.serving.grammar import masks
from moec.serving.grammar.masks import AfterThinking, Grammars, grammar_bytes, json_grammar
from tests.serving.engine_requests import Asked, ask
from tests.serving.live_server import LiveServer

pytest.importorskip("llguidance")

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
COLOUR = {"enum": ["red", "green"]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "colour": COLOUR, "n": {"type": "integer"}},
    "required": ["name", "colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ONE = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def grammars(engine: Engine) -> Iterator[Grammars]:
    ends = engine.bundle.manifest.model.eos_token_ids
    opened = Grammars(engine.tokenizer, engine.model.spec.vocab_size, ends)
    yield opened
    opened.close()


def content(server: LiveServer, **change: Any) -> str:
    reply = server.post(CHAT, {**BODY, **change})
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["message"]["content"])


def test_an_answer_follows_the_schema(server: LiveServer) -> None:
    """The weights are random, so that without a mask no answer is JSON."""
    with pytest.raises(ValueError):
        json.loads(content(server))
    assert json.loads(content(server, response_format=ONE)) in ("red", "green")
    for seed in range(3):
        text = content(server, response_format=FORMAT, temperature=1.0, seed=seed, max_tokens=90)
        jsonschema.validate(json.loads(text), SCHEMA)


def test_it_ends_when_the_value_is_complete(server: LiveServer) -> None:
    reply = server.post(CHAT, {**BODY, "response_format": ONE}).json
    assert reply["choices"][0]["finish_reason"] == "stop"
    short = server.post(CHAT, {**BODY, "response_format": {"type": "json_object"}, "max_tokens": 1}).json
    assert short["choices"][0]["finish_reason"] == "length"


def test_streams_and_several_answers(server: LiveServer) -> None:
    events = server.post(CHAT, {**BODY, "response_format": ONE, "stream": True, "n": 2, "temperature": 1.0}).events
    for index in (0, 1):
        parts = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
        assert json.loads("".join(part["delta"].get("content", "") for part in parts)) in ("red", "green")
        assert parts[-1]["finish_reason"] == "stop"


def test_the_responses_api_has_it_as_text_format(server: LiveServer) -> None:
    form = {"type": "json_schema", "name": "colour", "schema": COLOUR}
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 60, "text": {"format": form}}
    found = server.post(RESPONSES, body).json
    assert json.loads(found["output"][0]["content"][0]["text"]) in ("red", "green")
    assert found["text"]["format"] == form


def test_log_probabilities_are_those_of_the_model(server: LiveServer) -> None:
    """The mask does not change what the model says about a token."""
    more = {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}
    free = server.post(CHAT, {**BODY, **more}).json["choices"][0]["logprobs"]["content"][0]
    bound = server.post(CHAT, {**BODY, **more, "response_format": ONE}).json["choices"][0]["logprobs"]["content"][0]
    assert bound["top_logprobs"] == free["top_logprobs"]
    assert bound["token"] != free["token"] and bound["logprob"] < free["logprob"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "xml"}, "response_format.type", "unsupported_value"),
    ({"type": "json_schema"}, "response_format", "missing_field"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema", "invalid_value"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": 5}}}, "response_format", "invalid_schema"),
    ({"type": "json_schema", "json_schema": {"schema": {"enum": []}}}, "response_format", "invalid_schema"),
    ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "response_format", "invalid_schema"),
    ({"type": "json_schema", "json_schema": {"schema": {"$ref": "other"}}}, "response_format", "invalid_schema"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}},
        "response_format",
        "invalid_schema",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * masks.MAX_SCHEMA_CHARACTERS]}}},
        "response_format",
        "invalid_schema",
    ),
    ({"type": "text", "more": 1}, "response_format.more", "unknown_field"),
]


@pytest.mark.parametrize(("form", "param", "code"), WRONG, ids=[str(form)[:60] for form, _, _ in WRONG])
def test_wrong_schemas_are_named(server: LiveServer, form: dict[str, Any], param: str, code: str) -> None:
    reply = server.post(CHAT, {**BODY, "response_format": form})
    assert reply.status == 400, reply.body
    assert (reply.error["param"], reply.error["code"]) == (param, code)


def test_without_the_package_it_is_a_named_error(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "PACKAGE", "llguidance_is_not_here")
    reply = server.post(CHAT, {**BODY, "response_format": {"type": "json_object"}})
    assert reply.status == 400 and reply.error["code"] == "grammar_not_installed"
    assert "llguidance" in reply.error["message"]


def test_a_schema_that_takes_too_much_ends_its_answer_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some limits are met only while an answer is made."""
    monkeypatch.setitem(masks.STEP_LIMITS, "max_lexer_states", 24)
    small = Grammars(engine.tokenizer, engine.model.spec.vocab_size, engine.bundle.manifest.model.eos_token_ids)
    grammar = json_grammar({"type": "string", "minLength": 400})
    with Scheduler(engine) as scheduler:
        bound, free = Asked([5, 6], 60, mask=small.compiled(grammar).mask()), Asked([7, 8], 12)
        ask(scheduler, bound, free)
    small.close()
    assert bound.failed.code == "InputError" and "schema" in bound.failed.message
    assert error_of_failure(bound.failed).status == 400
    assert free.ended.reason in ("stop", "length")


def test_other_answers_of_a_pass_keep_their_bits(engine: Engine, grammars: Grammars) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13]]
    grammar = json_grammar({"type": "object"})
    bound = Asked(prompts[0], 24, mask=grammars.compiled(grammar).mask())
    free = Asked(prompts[1], 24, log_probs=3)
    with Scheduler(engine) as scheduler:
        ask(scheduler, bound, free)
        alone = Asked(prompts[1], 24, log_probs=3)
        ask(scheduler, alone)
        same = Asked(prompts[0], 24, mask=grammars.compiled(grammar).mask())
        ask(scheduler, same)
    assert (free.tokens, [event for event in free.events[:-1]]) == (
        alone.tokens,
        [event for event in alone.events[:-1]],
    )
    assert bound.tokens == same.tokens and bound.text.lstrip().startswith("{")


def byte_fallback() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *'abc{}":[]', "\u2581a", "\u00e4", "</s>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[("\u2581", "a")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("text", ["ab a", "a", " a", '{"a":"\u00e4 \u20ac"}', "\U0001f600"])
def test_bytes_of_tokens_are_those_of_the_text(text: str, engine: Engine) -> None:
    for tokens in (TokenBytes(byte_fallback()), engine.tokenizer.token_bytes()):
        words, special = tokens.of_vocabulary(300)
        ids = tokens.ids(text)
        if len(text) < 9 or "<0x00>" in words:
            assert b"".join(words[each] for each in ids) == text.encode()
        assert special


def test_a_tokenizer_of_another_kind_has_no_grammar() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="decoder"):
        TokenBytes(tokenizer)


class Letters:
    """Three tokens: the letters of `<think>`, of `</think>`, and an answer."""

    def decode(self, ids: Any) -> str:
        return "".join({0: "<think>", 1: "hm", 2: "</think>", 3: "{}", 4: "."}[each] for each in ids)


class Only:
    """A mask that allows one token, which completes the answer."""

    def allowed(self) -> np.ndarray:
        return np.arange(6) == 3

    def take(self, token: int) -> bool:
        return token == 3


def test_the_grammar_begins_after_the_thinking() -> None:
    mask = AfterThinking(Only(), Letters(), False, 6, (5,), opening=0, closing=2)
    assert np.flatnonzero(mask.allowed()).tolist() == [0, 3]
    assert not mask.take(0)
    assert np.flatnonzero(mask.allowed()).tolist() == [0, 1, 2, 3, 4]  # the end token is not allowed
    assert not mask.take(1) and not mask.take(2)
    assert np.flatnonzero(mask.allowed()).tolist() == [3]
    assert mask.take(3)
    opened = AfterThinking(Only(), Letters(), True, 6, (5,))
    assert not opened.take(1) and not opened.take(2)
    assert np.flatnonzero(opened.allowed()).tolist() == [3]


def resident_bytes() -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def test_memory_of_grammars_is_counted(engine: Engine) -> None:
    """The vocabulary, and the states of eight answers to schemas that need much."""
    tokens, before = engine.model.spec.vocab_size, resident_bytes()
    grammars = Grammars(engine.tokenizer, tokens, engine.bundle.manifest.model.eos_token_ids)
    kept = []
    for pattern in (".*(a|b)*.{400}c", "(a{1,1000}){1,1000}", "(.*a){8}.*b.*c"):
        grammar = json_grammar({"type": "string", "pattern": pattern})
        for _ in range(8):
            mask = grammars.compiled(grammar).mask()
            kept.append(mask)
            try:
                for _ in range(60):
                    allowed = np.flatnonzero(mask.allowed())
                    if not len(allowed) or mask.take(int(allowed[len(allowed) // 2])):
                        break
            except InputError:
                continue
    assert resident_bytes() - before <= grammar_bytes(tokens, len(kept))
    grammars.close()


HOSTILE = [
    {"type": "integer", "multipleOf": 10000019},
    {"type": "integer", "multipleOf": 1000003},
    {"allOf": [{"type": "integer", "multipleOf": value} for value in (101, 103, 107, 109)]},
    {"type": "string", "pattern": "(" * 20_000 + ")" * 20_000},
]


@pytest.mark.gate("G10")
@pytest.mark.parametrize("schema", HOSTILE, ids=["multipleOf", "smaller", "allOf", "brackets"])
def test_a_schema_that_takes_too_much_is_refused_before_it_is_compiled_here(
    server: LiveServer, schema: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    reply = server.post(CHAT, {**BODY, "response_format": form, "n": 3})
    assert reply.status == 400 and reply.error["param"] == "response_format", reply.body
    assert "cannot be followed" in reply.error["message"] and len(reply.error["message"]) < 300


def test_the_end_of_the_server_ends_a_grammar_that_is_compiled(engine: Engine) -> None:
    grammars = Grammars(engine.tokenizer, engine.model.spec.vocab_size, ())
    grammars.stop()
    with pytest.raises(masks.GrammarsClosed):
        grammars.compiled(json_grammar(COLOUR))
    grammars.close()


def test_open_requests_with_one_schema_share_its_grammar(grammars: Grammars) -> None:
    first, second = (grammars.compiled(json_grammar(COLOUR)) for _ in range(2))
    assert first is second


def test_special_tokens_inside_a_mark_are_written_by_their_number() -> None:
    assert masks.mark_literals("a<b>\n", {"<b>": 7}) == ['"a"', "<[7]>", '"\\n"']
