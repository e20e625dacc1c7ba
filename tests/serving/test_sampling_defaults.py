"""Requests that do not say how to draw tokens get what the server's bundle recommends."""

from __future__ import annotations

from typing import Any

import pytest

from moec.runtime import Engine
from moec.runtime.text.generation_defaults import PLAIN
from moec.runtime.text.sampling import SamplingOptions
from moec.serving.api.fields import Fields, read_sampling
from moec.serving.api.service import ServiceOptions
from tests.serving.live_server import live_server

OF_BUNDLE = SamplingOptions(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
GREEDY = SamplingOptions()


def chosen(defaults: SamplingOptions, **body: Any) -> tuple[float, ...]:
    """Return temperature, top-k, top-p, min-p and repetition penalty of a request."""
    found = read_sampling(Fields(body), 100, defaults)
    return (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty)


@pytest.mark.parametrize(
    ("defaults", "body", "wanted"),
    [
        (PLAIN, {}, (1, 0, 1, 0, 1)),
        (OF_BUNDLE, {}, (0.6, 20, 0.95, 0, 1.1)),
        (OF_BUNDLE, {"temperature": None}, (0.6, 20, 0.95, 0, 1.1)),
        (OF_BUNDLE, {"temperature": 1, "top_k": -1}, (1, 0, 0.95, 0, 1.1)),
        (OF_BUNDLE, {"temperature": 0}, (0, 0, 1, 0, 1)),
        (OF_BUNDLE, {"temperature": 0, "top_p": 0.9, "repetition_penalty": 1.3}, (0, 0, 1, 0, 1.3)),
        (OF_BUNDLE, {"top_k": 1}, (0, 0, 1, 0, 1)),
        (PLAIN, {"top_p": 0}, (0, 0, 1, 0, 1)),
        (GREEDY, {}, (0, 0, 1, 0, 1)),
        (GREEDY, {"min_p": 0.1}, (1, 0, 1, 0.1, 1)),
        (GREEDY, {"temperature": 0.5}, (0.5, 0, 1, 0, 1)),
    ],
    ids=str,
)
def test_a_request_counts_more(defaults: SamplingOptions, body: dict[str, Any], wanted: tuple[float, ...]) -> None:
    assert chosen(defaults, **body) == wanted


def test_every_api_has_the_recommendation(engine: Engine) -> None:
    user = [{"role": "user", "content": "hi"}]
    common = {"seed": 5, "max_tokens": 12}
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}
    with live_server(engine, service_options=ServiceOptions("tiny", OF_BUNDLE, deadline_s=60)) as server:
        props = server.ask("GET", "/props").json["sampling"]
        for path, body in (
            ("/v1/completions", {"prompt": "hi", **common}),
            ("/v1/chat/completions", {"messages": user, **common}),
            ("/v1/messages", {"messages": user, **common}),
            ("/v1/responses", {"input": "hi", "seed": 5, "max_output_tokens": 12}),
        ):
            implied, said = server.post(path, body).json, server.post(path, {**body, **wanted}).json
            for each in (implied, said):
                each.update(id="", created=0, created_at=0, timings={}, usage={})
            if path == "/v1/responses":
                assert (implied["temperature"], implied["top_p"]) == (0.6, 0.95)
                implied, said = ({"text": each["output"][0]["content"]} for each in (implied, said))
            assert implied == said
    assert props == {name: value for name, value in wanted.items() if name != "seed"} | {"min_p": 0.0}
