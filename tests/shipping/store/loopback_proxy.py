"""A proxy of HTTP on loopback, which knows names that nothing else knows."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.shipping.servers import QuietHandler, on_loopback


@dataclass
class LoopbackProxy:
    """A proxy and what it was asked for.

    places: host and port on loopback by the host and port of a request.
    authorization: header that each request must have; empty: none.
    status: answer to every request; 0: it does its work.
    asked: method and target of each request.
    seen: everything that passed in plain text.
    """

    places: dict[str, str] = field(default_factory=dict)
    authorization: str = ""
    status: int = 0
    host: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    seen: bytearray = field(default_factory=bytearray)


class ProxyHandler(QuietHandler, BaseHTTPRequestHandler):
    """Answers of a LoopbackProxy."""

    proxy: LoopbackProxy

    def do_CONNECT(self) -> None:
        place = self._place(self.path)
        if place is None:
            return
        host, _, port = place.partition(":")
        with socket.create_connection((host, int(port))) as server:
            self.send_response(200)
            self.end_headers()
            answers = threading.Thread(target=_hand_on, args=(server, self.connection), daemon=True)
            answers.start()
            _hand_on(self.connection, server)
            answers.join()
        self.close_connection = True

    def forward(self) -> None:
        """Send a request on, and its answer back."""
        place = self._place(urlsplit(self.path).netloc)
        if place is None:
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.proxy.seen += str(self.headers).encode() + body
        headers = {name: value for name, value in self.headers.items() if not name.startswith("Proxy-")}
        parts = urlsplit(self.path)
        server = http.client.HTTPConnection(place)
        server.request(self.command, f"{parts.path}?{parts.query}".rstrip("?"), body, headers)
        answer = server.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        server.close()

    def _place(self, asked: str) -> str | None:
        """Return the server for a request. Refuse it if there is none, or its credentials are missing."""
        proxy = self.proxy
        proxy.asked.append((self.command, self.path))
        status = proxy.status
        if not status and proxy.authorization and self.headers.get("Proxy-Authorization") != proxy.authorization:
            status = 407
        place = proxy.places.get(asked)
        if not status and place is None:
            status = 502
        if status:
            self.close_connection = True
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        return place


for _method in ("GET", "HEAD", "PUT", "MKCOL", "COPY", "POST", "PATCH"):
    setattr(ProxyHandler, f"do_{_method}", ProxyHandler.forward)


def _hand_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving_proxy(places: dict[str, str], authorization: str = "") -> Iterator[LoopbackProxy]:
    """Serve on loopback until the end of the block."""
    proxy = LoopbackProxy(places, authorization)
    with on_loopback(ProxyHandler, proxy=proxy) as host:
        proxy.host = host
        yield proxy
