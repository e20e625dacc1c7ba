"""Who may ask, over real connections."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moec.manifests.errors import InputError, OptionError
from moec.runtime import Engine
from moec.serving import security, serve
from moec.serving.api.service import ServiceOptions
from moec.serving.security import SecurityOptions, read_key
from tests.serving.live_server import PATIENCE_S, LiveServer, live_server

KEY = b"0123456789abcdef"
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(engine: Engine) -> Iterator[LiveServer]:
    """A server with a key, another name, and one origin."""
    options = SecurityOptions("127.0.0.1", ["board.local"], ["http://app.local"], KEY)
    with live_server(engine, security=options) as running:
        yield running


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:8080", "127.9.9.9"])
def test_names_of_this_machine(server: LiveServer, host: str) -> None:
    assert server.ask("GET", "/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "localhost.evil.example", "[", "x@localhost",
     "[::1].evil.com", "[::1]evil", "[localhost]", "localhost:evil", "localhost:80:80"],
)  # fmt: skip
def test_other_names_are_refused(server: LiveServer, host: str) -> None:
    reply = server.ask("GET", "/health", headers={"Host": host})
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


def test_allowed_names(locked: LiveServer) -> None:
    assert locked.ask("GET", "/health", headers={"Host": "board.local:80"}).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_pages_of_other_sites_may_not_ask(server: LiveServer, origin: str) -> None:
    reply = server.post("/v1/completions", BODY, Origin=origin)
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_the_page_itself_may_ask(server: LiveServer) -> None:
    assert server.post("/v1/completions", BODY, Origin=f"http://127.0.0.1:{server.port}").status == 200


def test_the_page_may_ask_through_a_proxy_with_tls(locked: LiveServer) -> None:
    headers = {"Host": "board.local", "Origin": "https://board.local", "Authorization": f"Bearer {KEY.decode()}"}
    assert locked.ask("POST", "/v1/completions", BODY, headers).status == 200
    assert locked.ask("POST", "/v1/completions", BODY, {**headers, "Origin": "https://other.local"}).status == 403


@pytest.mark.parametrize(
    "options",
    [
        {"cors_origins": ["*"]},
        {"cors_origins": ["http://x/"]},
        {"cors_origins": ["app.local"]},
        {"allowed_hosts": ["http://x"]},
        {"allowed_hosts": ["x:80"]},
        {"allowed_hosts": [""]},
    ],
)
def test_names_that_no_request_can_have_are_refused(options: dict[str, list[str]]) -> None:
    with pytest.raises(OptionError, match="must be"):
        SecurityOptions("127.0.0.1", **options).check()
    SecurityOptions("127.0.0.1", ["board.local", "::1", "10.0.0.1"], ["https://app.local", "http://x:1"]).check()


def test_long_headers_are_refused(server: LiveServer) -> None:
    for headers in ({"X-Long": "y" * 33_000}, {f"X-{number}": "y" * 900 for number in range(40)}):
        assert server.ask("GET", "/health", headers=headers).status in (400, 431)
    assert server.ask("GET", "/health", headers={"X-Long": "y" * 30_000}).status == 200


@pytest.mark.gate("G16")
def test_clients_that_read_nothing_are_cut_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is longer than what the system keeps for the connection."""
    monkeypatch.setattr(serve, "UNREAD_S", 0.2)
    longest = max(range(engine.model.spec.vocab_size), key=lambda token: len(engine.tokenizer.decode([token])))
    body = json.dumps({"tokens": [longest] * 200_000}, separators=(",", ":")).encode()
    head = f"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with live_server(engine) as server, contextlib.closing(connection):
        # Connections inherit it. Without it the system keeps up to 4 MB of a response.
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head + body)
        server.wait_until_idle()


def test_a_named_origin_may_ask(locked: LiveServer) -> None:
    asked = locked.ask("OPTIONS", "/v1/completions", headers={"Origin": "http://app.local"})
    assert asked.status == 204 and asked.headers["access-control-allow-origin"] == "http://app.local"
    assert "access-control-allow-credentials" not in asked.headers
    assert "*" in asked.headers["access-control-allow-headers"]
    reply = locked.post("/v1/completions", BODY, Origin="http://app.local", Authorization=f"Bearer {KEY.decode()}")
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "http://app.local"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY.decode()}, {"X-Api-Key": "a"}]
)
def test_requests_without_the_key(locked: LiveServer, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/props", "/v1/moec/events"):
        reply = locked.ask("GET", path, headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    refused = locked.post("/v1/messages", BODY, **headers).json
    assert refused["type"] == "error" and refused["error"]["type"] == "authentication_error"
    assert locked.ask("GET", "/health").status == 200


@pytest.mark.parametrize("headers", [{"Authorization": f"bearer {KEY.decode()}"}, {"X-Api-Key": KEY.decode()}])
def test_the_key_opens(locked: LiveServer, headers: dict[str, str]) -> None:
    assert locked.ask("GET", "/v1/models", headers=headers).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "board.local"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(OptionError, match="--host"):
        SecurityOptions(host).check()
    SecurityOptions(host, api_key=KEY).check()


@pytest.mark.parametrize("data", [b"", b"short\n", b"with space inside\n", b"\xff" * 20, b"x" * 5000])
def test_keys_are_checked(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    with pytest.raises(InputError, match="key"):
        read_key(path)
    path.write_bytes(KEY + b"\n")
    (tmp_path / "secret").symlink_to(path.name)  # as container systems mount secrets
    assert read_key(path) == read_key(tmp_path / "secret") == KEY


def test_every_response_confines_a_page(server: LiveServer) -> None:
    for path in ("/health", "/v1/nothing"):
        headers = server.ask("GET", path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and "server" not in headers


def test_large_bodies_are_refused(server: LiveServer) -> None:
    reply = server.ask("POST", "/v1/completions", b"", {"Content-Length": str(1 << 40)})
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def raw(server: LiveServer, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes and return all that comes until the server closes the connection."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        found = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                found += data
        return found


LONG_BODIES = [
    b"Content-Length: 6000000\r\n\r\n" + b" " * 6_000_000,
    b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 90 + b"0\r\n\r\n",
]


@pytest.mark.parametrize("rest", LONG_BODIES, ids=["length", "chunked"])
@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/v1/completions", "localhost", 413), ("/nothing", "localhost", 404), ("/v1/completions", "evil.com", 403)],
)
def test_a_client_that_still_sends_gets_its_answer(
    server: LiveServer, path: str, host: str, status: int, rest: bytes
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n".encode()
    for _ in range(3):
        assert raw(server, head + rest).startswith(f"HTTP/1.1 {status} ".encode())


def test_the_rest_of_a_body_is_dropped_within_limits(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "DROPPED_S", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n"
    assert raw(server, head).startswith(b"HTTP/1.1 413 "), "the connection ends, although the body never comes"


def test_slow_clients_are_cut_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEADER_S", 0.2)
    options = ServiceOptions("tiny", deadline_s=PATIENCE_S, body_s=0.2)
    with live_server(engine, service_options=options) as server:
        assert raw(server, b"POST /v1/completions HT") == b""
        assert raw(server) == b""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nConnection: close\r\n\r\n"
        assert b"408" in raw(server, head, b"{").partition(b"\r\n")[0]
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert b"200 OK" in raw(server, first, b"GET /health", pause_s=0.1)


def test_nothing_leaves_the_machine(server: LiveServer) -> None:
    """All addresses that this process connects to or looks up while it answers."""
    asked, is_watching = list[object](), True

    def watch(event: str, values: tuple[object, ...]) -> None:
        if is_watching and event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.gethostbyname"):
            asked.append(values[1] if event in ("socket.connect", "socket.sendto") else values[0])

    sys.addaudithook(watch)
    message = {"messages": [{"role": "user", "content": "see http://192.0.2.1/a"}], "max_tokens": 3}
    for path, body in (("/v1/chat/completions", message), ("/v1/messages", message), ("/v1/completions", BODY)):
        assert server.post(path, body).status == 200
    assert server.ask("GET", "/").status == server.ask("GET", "/props").status == 200
    is_watching = False
    hosts = {each[0] if isinstance(each, tuple) else each for each in asked}
    assert len(asked) >= 5 and hosts == {"127.0.0.1"}


def test_metrics_have_the_form_of_prometheus(server: LiveServer) -> None:
    server.post("/v1/completions", BODY)
    reply = server.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    pattern = re.compile(r'moec_[a-z_]+(\{end="[a-z_]+"\})? [0-9]+(\.[0-9]+)?')
    values = [line for line in lines if not line.startswith("#")]
    assert values and all(pattern.fullmatch(line) for line in values)
    assert any(line.startswith("moec_answer_tokens_total ") and not line.endswith(" 0") for line in values)


def test_tokens_there_and_back(server: LiveServer, engine: Engine) -> None:
    found = server.post("/tokenize", {"content": "Question: what", "with_pieces": True}).json
    ids = [token["id"] for token in found["tokens"]]
    assert ids == engine.encode("Question: what") and found["count"] == len(ids)
    assert "".join(token["piece"] for token in found["tokens"]) == "Question: what"
    assert server.post("/detokenize", {"tokens": ids}).json["content"] == "Question: what"
    assert server.post("/tokenize", {"prompt": "Question: what"}).json["tokens"] == ids
    assert server.post("/tokenize", {}).error["code"] == "missing_field"
    for tokens in (5, ["a"], [-1], [10**9]):
        assert server.post("/detokenize", {"tokens": tokens}).status == 400


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/v1/models/", "/api/tags", "/v1/embeddings"])
def test_a_path_that_is_nearly_one_says_what_to_ask(server: LiveServer, path: str) -> None:
    reply = server.ask("GET", path)
    assert reply.status == 404 and "ask `/v1/" in reply.error["message"]
