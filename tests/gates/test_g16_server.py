"""G16: the server loses no request. Loopback: many clients, disconnects, overload, faults, hostile bytes.

Signals and memory of a process: `test_g16_process.py`.

MOEC_FULL_GATES=1 takes the full counts: 64 clients for 10 minutes, 200 disconnects, 20,000 hostile requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import Engine, load
from moec.serving.api.service import ServiceOptions
from moec.serving.engine.scheduler import ServingOptions
from tests.gates.bundles import emit_bundle
from tests.listed_file import add_listed
from tests.serving.live_server import PATIENCE_S, LiveServer, in_threads, live_server
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

IS_FULL = os.environ.get("MOEC_FULL_GATES") == "1"
CLIENTS, SECONDS = (64, 600) if IS_FULL else (12, 2)
DISCONNECTS = 200 if IS_FULL else 24
HOSTILE = 20_000 if IS_FULL else 300
CONTEXT, PATH = 96, "/v1/completions"
GROWTH_BYTES = 48 << 20
EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"
TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

pytestmark = [pytest.mark.gate("G16"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight experts with a chat template."""
    root = tmp_path_factory.mktemp("g16")
    model = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=8, top_k=2, seed=16))
    made = emit_bundle(model, root / "bundle", mixed=True)
    add_listed(made, "chat_template.jinja", TEMPLATE)
    return made


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    """Half of the experts fit."""
    with load(bundle, expert_cache="50%", context=CONTEXT, slots=4) as opened:
        yield opened


BODIES: list[dict[str, Any]] = [
    {"prompt": f"{'word ' * (number % 5)}item {number}:", "max_tokens": 4 + 7 * (number % 4), "temperature": 0}
    for number in range(12)
]


def expected(engine: Engine) -> list[str]:
    steps = [engine.generate(body["prompt"], body["max_tokens"]) for body in BODIES]
    return ["".join(step.text for step in each) for each in steps]


def text_of(server: LiveServer, body: dict[str, Any], streams: bool) -> str:
    """Return the text of an answer. Its stream must have an end."""
    reply = server.post(PATH, {**body, "stream": streams})
    assert reply.status == 200, reply.body
    if not streams:
        return str(reply.json["choices"][0]["text"])
    assert reply.body.endswith(b"data: [DONE]\n\n") and reply.events[-1]["choices"][0]["finish_reason"]
    return "".join(event["choices"][0]["text"] for event in reply.events)


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0]) * 1024


def abandon(port: int, body: dict[str, Any], after_bytes: int, pause_s: float) -> None:
    """Begin a request, read some of the answer, wait, and leave without a word."""
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) as connection:
        connection.sendall(head + data)
        if after_bytes:
            connection.recv(after_bytes)
        time.sleep(pause_s)


def test_many_clients_get_their_own_answers(engine: Engine) -> None:
    wanted = expected(engine)
    with live_server(engine, ServingOptions(queue=2 * CLIENTS, prefill_tokens=16)) as server:
        ends_s = time.monotonic() + SECONDS
        asked = [0] * CLIENTS

        def client(number: int) -> None:
            draw = random.Random(number)
            while time.monotonic() < ends_s or not asked[number]:
                which = draw.randrange(len(BODIES))
                if draw.random() < 0.1:
                    abandon(server.port, {**BODIES[which], "stream": True}, draw.choice((0, 20)), 0.0)
                assert text_of(server, BODIES[which], draw.random() < 0.5) == wanted[which]
                asked[number] += 1

        in_threads([lambda: client(0)])
        before = resident_bytes()
        in_threads([lambda number=number: client(number) for number in range(CLIENTS)])  # type: ignore[misc]
        assert min(asked) > 0 and engine.cache.stats.evictions > 0
        assert resident_bytes() - before < GROWTH_BYTES
        server.wait_until_idle()


@pytest.mark.parametrize("streams", [True, False])
def test_clients_that_leave_leave_nothing(engine: Engine, streams: bool) -> None:
    """At random moments: in the queue, while the prompt is computed, while the answer comes."""
    draw = random.Random(int(streams))
    (wanted, *_) = expected(engine)
    with live_server(engine, ServingOptions(prefill_tokens=2)) as server:
        long = {"prompt": "a long story " * 3, "max_tokens": CONTEXT, "temperature": 0, "stream": streams}
        for start in range(0, DISCONNECTS, 8):
            moments = [(draw.choice((0, 1)) * streams, draw.random() * 0.02) for _ in range(8)]
            in_threads([lambda each=each: abandon(server.port, long, *each) for each in moments])  # type: ignore[misc]
            server.wait_until_idle()
            if start % 40 == 0:
                assert text_of(server, BODIES[0], False) == wanted
        passes = server.scheduler.activity.passes
        ends = server.scheduler.activity.requests
        assert ends.get("cancelled", 0) > 0
        time.sleep(0.05)
        assert server.scheduler.activity.passes == passes
        assert server.scheduler.pool.free == engine.options.slots
        assert text_of(server, BODIES[0], True) == wanted


def test_a_request_ends_within_a_pass_of_its_clients_leave(engine: Engine) -> None:
    with live_server(engine) as server:
        abandon(server.port, {**BODIES[0], "max_tokens": CONTEXT, "stream": True, "logit_bias": {"2": -100}}, 1, 0.0)
        server.wait_until_idle()
        assert server.scheduler.activity.requests == {"cancelled": 1}


def test_an_overloaded_server_refuses_and_goes_on(engine: Engine) -> None:
    wanted = expected(engine)
    with live_server(engine, ServingOptions(queue=2)) as server:
        statuses: list[int] = []

        def ask(number: int) -> None:
            which = number % len(BODIES)
            reply = server.post(PATH, BODIES[which])
            statuses.append(reply.status)
            if reply.status == 200:
                assert reply.json["choices"][0]["text"] == wanted[which]
            else:
                assert reply.status == 429 and int(reply.headers["retry-after"]) > 0
                assert reply.error["code"] == "queue_full"

        in_threads([lambda number=number: ask(number) for number in range(40)])  # type: ignore[misc]
        assert statuses.count(200) >= 6
        server.wait_until_idle()
        assert text_of(server, BODIES[1], True) == wanted[1]
        assert server.post(PATH, {**BODIES[0], "n": 16}).status == 429


def test_a_damaged_expert_ends_requests_by_name(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    with load(copy, expert_cache="50%", context=CONTEXT, slots=4, cache_state="cold") as engine:
        wanted = expected(engine)
        path = copy / engine.bundle.manifest.experts[0].file
        good = path.read_bytes()
        with live_server(engine) as server:
            path.write_bytes(good[:4096] + bytes(255 - byte for byte in good[4096:]))
            replies = [server.post(PATH, body) for body in BODIES]
            failed = [reply for reply in replies if reply.status != 200]
            assert failed and {(reply.status, reply.error["code"]) for reply in failed} == {(500, "ChecksumMismatch")}
            streamed = server.post(PATH, {**BODIES[0], "stream": True})
            assert streamed.status in (200, 500)
            path.write_bytes(good)
            assert [text_of(server, body, False) for body in BODIES] == wanted


def test_storage_that_stalls_ends_requests_by_their_deadline(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass waits for its bytes and cannot be interrupted. The client gets its error meanwhile."""
    (wanted, *_) = expected(engine)
    step, arrived = engine.step, threading.Event()

    def stalled(*values: Any) -> Any:
        assert arrived.wait(PATIENCE_S)
        return step(*values)

    options = ServiceOptions("tiny", deadline_s=0.3, grace_s=0.3)
    with live_server(engine, service_options=options) as server:
        monkeypatch.setattr(engine, "step", stalled)
        for streams in (False, True):
            reply = server.post(PATH, {**BODIES[0], "stream": streams})
            assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        assert server.scheduler.running == 1
        arrived.set()
        server.wait_until_idle()
        monkeypatch.setattr(engine, "step", step)
        assert text_of(server, BODIES[0], False) == wanted


USER = [{"role": "user", "content": "a"}]


def hostile_schema(draw: random.Random) -> dict[str, Any]:
    """Return a `response_format` whose schema is wrong, endless, or takes much."""
    count = draw.randrange(1, 99_999)
    schema = draw.choice([
        {"type": "string", "pattern": f"(a{{1,{count}}}){{1,{count}}}"},
        {"type": "string", "pattern": "(" * draw.randrange(1, 999)},
        {"type": "array", "minItems": count * 10**6, "items": {"$ref": "#"}},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}] * draw.randrange(1, 99)},
        {"enum": ["x" * count]},
        {"type": count},
    ])  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def hostile_request(draw: random.Random, port: int) -> bytes:
    """Return the bytes of a request that no server should accept, or that it may refuse."""
    body = draw.choice([
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"prompt":' + b"[" * draw.randrange(1, 3000),
        b'{"prompt": "a", "max_tokens": 1' + b"0" * draw.randrange(1, 400) + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [' + b"9" * draw.randrange(1, 5000) + b"]}",
        json.dumps({"prompt": "x" * draw.randrange(1, 200_000)}).encode(),
        json.dumps({"prompt": [[5] * 90] * draw.randrange(65, 300)}).encode(),
        json.dumps({draw.choice(["prompt", "stop", "n", "seed", "logit_bias", "stream"]): {"a": [None]}}).encode(),
        json.dumps({"prompt": "a", "logit_bias": {str(-draw.randrange(9)): 1}}).encode(),
        json.dumps({"prompt": "a", "stop": ["x"] * draw.randrange(17, 999)}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "{{ 7 * 7 }}" * 9000}]}).encode(),
        json.dumps({"messages": [{"role": "user"}] * draw.randrange(1, 999)}).encode(),
        json.dumps({"messages": USER, "response_format": hostile_schema(draw)}).encode(),
        json.dumps({"messages": USER, "tools": [{draw.choice(["type", "function"]): [None]}] * 9}).encode(),
        draw.randbytes(draw.randrange(1, 2000)),
    ])  # fmt: skip
    path = draw.choice([
        PATH,
        PATH,
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/../../etc/passwd",
        "/v1/models/%2e%2e%2f%00",
        "//evil.example/",
        "/" + "a" * draw.randrange(1, 5000),
        "*",
    ])  # fmt: skip
    method = draw.choice(["POST"] * 6 + ["GET", "PUT", "OPTIONS", "CONNECT", "TRACE", "get\x00", ""])
    host = draw.choice(["localhost"] * 8 + ["evil.example", "", "a" * 2000, "\x7f"])
    length = draw.choice([str(len(body))] * 8 + [str(len(body) + 9), "-1", "9" * 40, "0x10"])
    more = draw.choice(
        [""] * 6 + ["X: " + "y" * 40_000 + "\r\n", "X: y\r\n" * 3000, "Transfer-Encoding: chunked\r\n", "\r"]
    )
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n"
    return head.encode("latin-1") + body


def status_of(port: int, data: bytes) -> int | None:
    """Return the status of the response to some bytes; None if the server closes the connection without one."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) as connection:
        found = b""
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
        match = re.match(rb"HTTP/1.1 (\d{3}) ", found)
        return int(match[1]) if match else None


def test_hostile_requests_are_refused(engine: Engine) -> None:
    (wanted, *_) = expected(engine)
    with live_server(engine) as server:
        draw, seen = random.Random(20), set[int | None]()
        for number in range(HOSTILE):
            seen.add(status_of(server.port, hostile_request(draw, server.port)))
            if number == HOSTILE // 4:
                before = resident_bytes()
        assert {400, 403, 404, 405} <= seen
        assert all(status is None or 200 <= status < 500 for status in seen), seen
        server.wait_until_idle()
        assert resident_bytes() - before < GROWTH_BYTES
        assert text_of(server, BODIES[0], True) == wanted
