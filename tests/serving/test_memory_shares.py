"""What each part of a server takes of its memory."""

from __future__ import annotations

from pathlib import Path

from moec.runtime import load
from moec.serving.api.fields import server_bytes
from moec.serving.api.service import memory_shares
from tests.serving.live_server import LiveServer, live_server

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
