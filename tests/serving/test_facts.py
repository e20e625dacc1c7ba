"""What a server tells about itself: the live feed, the shares of its memory, and the guide that lists its fields."""

from __future__ import annotations

import ast
import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moec.runtime import Engine, load
from moec.runtime.expert_cache.cache_spec import RESIDENT
from moec.serving.api.fields import server_bytes
from moec.serving.api.live_feed import ABSENT, HIT, IN_MEMORY, MAX_LISTENERS, MISSED, READ_AHEAD
from moec.serving.api.service import memory_shares
from moec.serving.app import FACTS, HANDLERS
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


CONTEXT = 96


def test_the_parts_are_the_whole_budget(tiny_bundle: Path) -> None:
    other = server_bytes(CONTEXT)
    with load(tiny_bundle, memory="4GiB", context=CONTEXT, slots=3, other_bytes=other) as engine:
        shares = memory_shares(engine)
        with live_server(engine) as server:
            assert server.ask("GET", "/props").json["memory_shares"] == shares
    parts = {name: value for name, value in shares.items() if name not in ("slots", "slot_bytes")}
    assert sum(parts.values()) + shares["slots"] * shares["slot_bytes"] == 4 << 30
    assert (shares["slots"], shares["server_bytes"]) == (3, other) and min(shares.values()) >= 0
    assert shares["slot_bytes"] == engine.model.spec.kv_bytes_per_position * CONTEXT


def test_a_cache_of_a_given_size_leaves_no_budget(server: LiveServer) -> None:
    shares = server.ask("GET", "/props").json["memory_shares"]
    assert shares["unused_bytes"] is None and shares["slots"] == 3
    assert shares["experts_bytes"] == server.service.engine.memory.cache_bytes


ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")


def names_without_effect(path: Path) -> set[str]:
    """Return the texts that a file hands to `without_effect`, and those in its tuples of names."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "without_effect":
            values = node.args
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            names = {name.id for name in node.targets if isinstance(name, ast.Name)}
            values = node.value.elts if names & {"_NO_EFFECT", "_OF_ANSWERS"} else []
        found |= {each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def test_fields_without_effect_are_listed() -> None:
    files = (ROOT / "serving" / "api").rglob("*.py")
    names = set[str]().union(*map(names_without_effect, files))
    assert {"user", "signature", "prompt_cache_key"} <= names
    assert {name for name in names if f"`{name}`" not in GUIDE} == set()


def test_all_paths_are_listed() -> None:
    paths = {path for path in (*HANDLERS, *FACTS) if f"`{path}`" not in GUIDE}
    assert paths == set()
