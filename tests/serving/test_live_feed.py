"""The live feed shows what the cache does, and costs nothing without a listener."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

from moec.runtime import Engine
from moec.runtime.expert_cache.cache_spec import RESIDENT
from moec.serving.api.live_feed import ABSENT, HIT, IN_MEMORY, MAX_LISTENERS, MISSED, READ_AHEAD
from tests.serving.live_server import LiveServer, live_server

PATH = "/v1/moec/events"
EXPERTS = 18


@contextlib.contextmanager
def listening(server: LiveServer) -> Iterator[Iterator[tuple[str, Any]]]:
    """Yield the events of a new listener, as (type, value)."""
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", PATH)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()

        def events() -> Iterator[tuple[str, Any]]:
            kind = ""
            while line := reply.readline().decode():
                if line.startswith("event: "):
                    kind = line[7:].strip()
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])

        with reply:
            yield events()


def states(value: dict[str, Any]) -> list[int]:
    return list(base64.b64decode(value["states"]))


def test_the_feed_tells_the_state_of_every_expert(server: LiveServer, engine: Engine) -> None:
    with listening(server) as events:
        kind, hello = next(events)
        assert kind == "hello" and hello["mode"] == server.ask("GET", "/props").json["mode"]
        kind, first = next(events)
        assert kind == "state" and len(states(first)) == EXPERTS
        seen, tokens = set[int](), first["tokens"]
        for _ in range(20):
            body = {"prompt": "Tell me", "max_tokens": 40, "temperature": 0, "ignored": None}
            assert server.post("/v1/completions", body).status == 200
            _, value = next(events)
            seen |= set(states(value))
            if {HIT, MISSED} <= seen and value["tokens"] > tokens:
                break
        assert {HIT, MISSED} <= seen <= {ABSENT, IN_MEMORY, HIT, MISSED, READ_AHEAD}
        assert value["memory_bytes"] > 0 and value["cache_capacity_bytes"] >= value["cache_bytes"] > 0
        engine.cache.finish_warming()
        quiet = next(value for _, value in events if value["hit_rate"] is None and value["running"] == 0)
        _, quiet = next(events)
    assert [state == IN_MEMORY for state in states(quiet)] == (engine.cache.states() == RESIDENT).tolist()
    assert quiet["hit_rate"] is None and quiet["running"] == 0


def test_facts_of_the_experts(server: LiveServer) -> None:
    found = server.ask("GET", "/v1/moec/experts").json
    assert found["layers"] == [6, 6, 6]
    assert {len(found[name]) for name in ("bits", "bytes", "popularity")} == {found["experts"]} == {EXPERTS}
    assert len(set(found["bits"])) > 1


def test_listeners_are_bounded_and_leave(server: LiveServer) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(MAX_LISTENERS):
            next(opened.enter_context(listening(server)))
        assert server.ask("GET", PATH).status == 429
    for _ in range(500):
        reply = server.ask("GET", "/health")
        assert reply.status == 200
        with contextlib.suppress(AssertionError), listening(server) as events:
            next(events)
            return
    raise AssertionError("listeners that left keep their places")


def test_the_end_of_the_server_ends_the_feed(engine: Engine) -> None:
    with live_server(engine) as server, listening(server) as events:
        next(events)
        server.scheduler.drain()
        for _ in events:
            pass
