"""Reads and uploads through a proxy: what it may see, which hosts have none, and what it refuses."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from moec.manifests.errors import InputError, StoreFailed
from moec.shipping.store.access import Access, Login, Proxy, parse_proxy
from moec.shipping.store.address import parse_address
from moec.shipping.store.http_client import HttpOptions
from moec.shipping.store.interface import Store
from moec.shipping.store.open_store import open_store
from tests.shipping.certificates import server_context, write_certificate
from tests.shipping.servers import serving
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.dav_server import DavHandler, DavServer
from tests.shipping.store.loopback_proxy import LoopbackProxy, serving_proxy
from tests.shipping.store.services import free_port
from tests.shipping.store.test_every_store import BUNDLE, NAME, WEIGHTS, push, read

HOST = "files.invalid"
"""A name that the proxy alone knows."""
SECRET, PASSWORD = "hunter2", "swordfish"
LOGIN = Login("worker", PASSWORD)


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DavServer]:
    """A server at HOST, without and with TLS."""
    (tmp_path / "dav").mkdir()
    certificate = write_certificate(tmp_path / "server.pem", HOST)
    tls = server_context(certificate) if request.param == "https" else None
    with serving(DavServer(tmp_path / "dav"), DavHandler, tls) as served:
        assert isinstance(served, DavServer)
        yield served


@pytest.fixture
def scheme(server: DavServer) -> str:
    return server.url.partition(":")[0]


@pytest.fixture
def proxy(server: DavServer) -> Iterator[LoopbackProxy]:
    place = urlsplit(server.url).netloc
    with serving_proxy({HOST: place, f"{HOST}:443": place}) as served:
        yield served


@pytest.fixture
def options(proxy: LoopbackProxy, tmp_path: Path) -> HttpOptions:
    """Options with this proxy for all hosts, which trust the server."""
    context = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
    return replace(PATIENCE, context=context, proxy_for=lambda scheme, host: parse_proxy(proxy.host, "HTTP_PROXY"))


def opened(closing: ExitStack, address: str, options: HttpOptions, token: str | None = None) -> Store:
    store = open_store(parse_address(address), Access(token), for_writing=True, options=options)
    closing.callback(store.close)
    return store


def test_push_and_pull_go_through_it(
    server: DavServer, proxy: LoopbackProxy, options: HttpOptions, scheme: str, closing: ExitStack, tmp_path: Path
) -> None:
    store = opened(closing, f"{scheme}://{HOST}/fleet", options, SECRET)
    push(store, tmp_path)
    assert read(store, f"{BUNDLE}/{NAME}", 3, 200_000) == WEIGHTS[3:200_000]
    assert (server.folder / "fleet" / BUNDLE / NAME).read_bytes() == WEIGHTS
    tokens = {request.headers.get("Authorization") for request in server.requests}
    if scheme == "https":
        assert set(proxy.asked) == {("CONNECT", f"{HOST}:443")} and len(proxy.asked) == 1
        assert tokens == {f"Bearer {SECRET}"}
    else:
        assert all(target.startswith(f"http://{HOST}/fleet/") for _, target in proxy.asked)
        assert tokens == {None}, "without TLS nothing gets credentials"
    assert all(request.headers["Host"].partition(":")[0] == HOST for request in server.requests)


def test_a_proxy_with_a_password(
    server: DavServer, proxy: LoopbackProxy, options: HttpOptions, scheme: str, closing: ExitStack, tmp_path: Path
) -> None:
    proxy.authorization = LOGIN.header()
    text = f"http://{LOGIN.user}:{PASSWORD}@{proxy.host}/"
    allowed = replace(options, proxy_for=lambda scheme, host: parse_proxy(text, "HTTP_PROXY"))
    push(opened(closing, f"{scheme}://{HOST}/fleet", allowed), tmp_path)
    assert all("Proxy-Authorization" not in request.headers for request in server.requests)
    proxy.asked.clear()
    wrong = text.replace(PASSWORD, "wrong")
    for refused in (options, replace(options, proxy_for=lambda scheme, host: parse_proxy(wrong, "HTTP_PROXY"))):
        with pytest.raises(StoreFailed, match=r"answered 407.*PROXY and its credentials") as told:
            opened(closing, f"{scheme}://{HOST}/fleet", refused).size_bytes("moec.json")
        assert "wrong" not in str(told.value)
    assert len(proxy.asked) == 2, "it is not asked again"


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (503, PATIENCE.attempts)])
def test_a_proxy_that_refuses(
    server: DavServer,
    proxy: LoopbackProxy,
    options: HttpOptions,
    scheme: str,
    closing: ExitStack,
    status: int,
    tries: int,
) -> None:
    proxy.status = status
    with pytest.raises(StoreFailed, match=f"answered {status}"):
        opened(closing, f"{scheme}://{HOST}/fleet", options).read_small("moec.json", 100)
    assert len(proxy.asked) == tries and server.requests == []


def test_the_socket_of_a_refusal_is_closed(
    server: DavServer,
    proxy: LoopbackProxy,
    options: HttpOptions,
    scheme: str,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is closed also while someone keeps the error and its frames."""
    connect, sockets = socket.create_connection, []

    def recorded(*args: Any, **named: Any) -> socket.socket:
        sockets.append(connect(*args, **named))
        return sockets[-1]

    proxy.status = 403
    store = opened(closing, f"{scheme}://{HOST}/fleet", options)
    monkeypatch.setattr(socket, "create_connection", recorded)
    with pytest.raises(StoreFailed) as kept:
        store.read_small("moec.json", 100)
    store.close()
    assert len(sockets) == 1 and sockets[0].fileno() == -1, f"while this is kept: {kept.value}"


def test_where_no_proxy_listens(server: DavServer, options: HttpOptions, scheme: str, closing: ExitStack) -> None:
    place = Proxy("127.0.0.1", free_port())
    absent = replace(options, proxy_for=lambda scheme, host: place)
    with pytest.raises(StoreFailed, match=f"/moec.json`: the proxy {place}: connection refused"):
        opened(closing, f"{scheme}://{HOST}/fleet", absent).size_bytes("moec.json")


def test_the_certificate_is_that_of_the_host(
    server: DavServer, proxy: LoopbackProxy, options: HttpOptions, scheme: str, closing: ExitStack
) -> None:
    """A proxy that leads to another server gets no request over TLS."""
    if scheme == "http":
        pytest.skip("has no certificate")
    proxy.places["other.invalid:443"] = proxy.places[f"{HOST}:443"]
    with pytest.raises(StoreFailed, match="certificate is not accepted: Hostname mismatch"):
        opened(closing, "https://other.invalid/fleet", options, SECRET).size_bytes("moec.json")
    assert server.requests == []


def test_this_machine_has_no_proxy(
    server: DavServer, proxy: LoopbackProxy, options: HttpOptions, closing: ExitStack, scheme: str
) -> None:
    """Its requests may have credentials without TLS."""
    if scheme == "https":
        pytest.skip("has a certificate of another name")
    assert opened(closing, f"{server.url}/fleet", options, SECRET).size_bytes("moec.json") is None
    assert proxy.asked == [] and server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("text", "host", "port", "login"),
    [
        ("http://proxy.example:3128", "proxy.example", 3128, None),
        ("proxy.example:3128/", "proxy.example", 3128, None),
        (" proxy ", "proxy", 80, None),
        ("http://[::1]:3128", "::1", 3128, None),
        ("http://worker:a%40b@proxy:1", "proxy", 1, Login("worker", "a@b")),
        ("http://worker@proxy", "proxy", 80, Login("worker", "")),
    ],
)
def test_forms_of_a_proxy(text: str, host: str, port: int, login: Login | None) -> None:
    found = parse_proxy(text, "HTTP_PROXY")
    assert (found.host, found.port) == (host, port)
    assert found.authorization == (login.header() if login else None)


@pytest.mark.parametrize(
    "text",
    ["https://a:hunter2@proxy", "socks5://a:hunter2@proxy:1", "http://", "http://p:0", "http://p:99999", "http://p/x",
     "http://a:hunter2@proxy:x", "a b", "http://p\r\nX: y", "http://a:hunter2@b@proxy:1"],
)  # fmt: skip
def test_what_is_no_proxy(text: str) -> None:
    with pytest.raises(InputError, match=r"`HTTPS_PROXY` names no proxy of HTTP .*write `HTTPS_PROXY=http://") as told:
        parse_proxy(text, "HTTPS_PROXY")
    assert SECRET not in str(told.value)
