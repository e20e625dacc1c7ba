"""Connections to HTTP servers: kept open between requests, and bounded in time and head of each answer."""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import ssl
import threading
import time
import traceback
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .access import Proxy, ProxyFor
from .address import is_loopback

LEAST_BYTES_PER_S = 512
"""Bytes per second that a server must send."""
WINDOW_BYTES = 1 << 20
"""Bytes that a server may send before they are taken. They are lost if this process is killed."""
MAX_ANSWER_HEAD_BYTES = 256 << 10
"""Most bytes before the body of an answer, interim answers included."""
_MOST_IDLE = 16


class Origin(NamedTuple):
    """Scheme, host and port of a URL."""

    scheme: str
    host: str
    port: int

    @property
    def place(self) -> str:
        """Host with the port, as a URL has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def origin_of(url: str) -> Origin:
    """Return the origin of a URL. Raises ValueError for what is no URL of HTTP, or has a user name."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"the scheme `{parts.scheme[:20]}` is not http or https")
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise ValueError("a host without user name is expected")
    return Origin(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))


def shown_place(url: str) -> str:
    """Return host and path of a URL, for messages. User name, password and query are left out."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{host}{parts.path}"[:400]


class Lateness:
    """Time that a server has lost against LEAST_BYTES_PER_S. Time in which the reader does something else is none."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._late_s = timeout_s, 0.0

    def add(self, waited_s: float, size_bytes: int) -> None:
        """Note a wait and the bytes that it brought. Raises TimeoutError if one time-out is lost."""
        self._late_s = max(0.0, self._late_s + waited_s - size_bytes / LEAST_BYTES_PER_S)
        if self._late_s > self._timeout_s:
            raise TimeoutError("the server sends too slowly")


class _TimedReader(io.RawIOBase):
    """Bytes of one answer as they arrive.

    Reading ends with TimeoutError if the server sends nothing for one time-out, or sends less than LEAST_BYTES_PER_S
    until one time-out is lost.
    has_body: set when the head of the answer was read. Before that, bytes are limited.
    """

    def __init__(self, raw: io.RawIOBase, timeout_s: float) -> None:
        super().__init__()
        self._raw, self._lateness = raw, Lateness(timeout_s)
        self._received = 0
        self.has_body = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        started = time.monotonic()
        count = self._raw.readinto(buffer)
        self._received += count or 0
        waited_s = time.monotonic() - started
        if not self.has_body and self._received > MAX_ANSWER_HEAD_BYTES:
            raise http.client.HTTPException("the head of the answer does not end")
        self._lateness.add(waited_s, count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class Answer(http.client.HTTPResponse):
    """A response whose bytes are timed."""

    def __init__(self, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self._timed = _TimedReader(self.fp.detach(), sock.gettimeout() or 1.0)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read status and headers."""
        super().begin()
        self._timed.has_body = True


def _settle(connected: socket.socket) -> None:
    """Bound the bytes that the kernel takes from the server in advance."""
    with contextlib.suppress(OSError, AttributeError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, WINDOW_BYTES)


class TunnelRefused(OSError):
    """A proxy does not connect to a server. status: its answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.status = status


class _PlainConnection(http.client.HTTPConnection):
    response_class = Answer

    def connect(self) -> None:
        super().connect()
        _settle(self.sock)


class _SecureConnection(http.client.HTTPSConnection):
    response_class = Answer

    def connect(self) -> None:
        try:
            super().connect()
        except (OSError, http.client.HTTPException) as error:
            # `http.client` of Python 3.11.2 keeps the answer of a proxy open, and its socket with it.
            traceback.clear_frames(error.__traceback__)
            refused = re.match("Tunnel connection failed: ([0-9]{3})", str(error))
            if refused is None:
                raise
            raise TunnelRefused(int(refused[1])) from None
        _settle(self.sock)


class Connections:
    """Connections that wait for a next request, and those in use.

    context: settings of TLS; None: those of the system.
    proxy_for: gives proxies; None: there are none.
    """

    def __init__(
        self, timeout_s: float, context: ssl.SSLContext | None = None, proxy_for: ProxyFor | None = None
    ) -> None:
        self._timeout_s, self._context, self._proxy_for = timeout_s, context, proxy_for
        self._lock = threading.Lock()
        self._idle: list[tuple[Origin, http.client.HTTPConnection]] = []
        self._used: set[http.client.HTTPConnection] = set()
        self._is_closed = False

    def take(self, origin: Origin) -> http.client.HTTPConnection:
        """Return a connection to an origin for one request. It may be closed; a request opens it.

        Raises ConnectionError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the client is closed")
            at = next((at for at in reversed(range(len(self._idle))) if self._idle[at][0] == origin), None)
            connection = self._new(origin) if at is None else self._idle.pop(at)[1]
            self._used.add(connection)
        return connection

    def give_back(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for a next request. Its last answer was read to the end, or it is closed."""
        with self._lock:
            self._used.discard(connection)
            if connection.sock is not None:
                self._idle.append((origin, connection))
            while self._idle and (self._is_closed or len(self._idle) > _MOST_IDLE):
                self._idle.pop(0)[1].close()

    def proxy_of(self, origin: Origin) -> Proxy | None:
        """Return the proxy for an origin, or None. A request to this machine goes to no other one."""
        if self._proxy_for is None or is_loopback(origin.place):
            return None
        return self._proxy_for(origin.scheme, origin.place)

    def _new(self, origin: Origin) -> http.client.HTTPConnection:
        proxy = self.proxy_of(origin)
        host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
        if origin.scheme == "http":
            return _PlainConnection(host, port, timeout=self._timeout_s)
        if self._context is None:
            self._context = ssl.create_default_context()
        connection = _SecureConnection(host, port, timeout=self._timeout_s, context=self._context)
        if proxy is not None:
            headers = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
            connection.set_tunnel(origin.host, origin.port, headers)
        return connection

    def close(self) -> None:
        """Close all connections. Reads of other threads end with an error."""
        with self._lock:
            self._is_closed = True
            for _, connection in self._idle:
                connection.close()
            self._idle.clear()
            for connection in self._used:
                opened = connection.sock
                if opened is not None:
                    with contextlib.suppress(OSError):
                        opened.shutdown(socket.SHUT_RDWR)
