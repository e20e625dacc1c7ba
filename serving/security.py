"""Who may ask: a check of Host, Origin and key before every request, and headers that confine the page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moec.manifests.errors import InputError, OptionError
from moec.manifests.files.input_file import UnreadableFile, read_input

from .api.answer import send_error
from .api.errors import RequestError

LEAST_KEY_CHARACTERS = 8
MAX_HEADER_BYTES = 32 << 10
_MAX_KEY_BYTES = 4096
DROPPED_S, _DROPPED_BYTES = 5.0, 64 << 20
"""Most time and bytes of a body that are read only so that the client gets its response."""
_OPEN_PATHS = frozenset(("/health", "/ready"))
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::[0-9]{0,5})?")
"""An address in brackets, or a name, and a port."""
_PAGE_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """Options of access.

    host: address that the server listens on.
    allowed_hosts: more names that a Host header may have.
    cors_origins: origins of pages that may ask from a browser.
    api_key: the key that requests must have; None for none.
    """

    host: str
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()
    api_key: bytes | None = None

    def check(self) -> None:
        """Refuse to listen for other machines without a key, and names that no request can have. Raises OptionError."""
        for origin in self.cors_origins:
            if not re.fullmatch(r"https?://[^/?#@\s*]+", origin):
                raise OptionError(
                    f"`--cors-origin` must be a scheme and a host, without a path, found `{origin}`",
                    "write it as http://app.local:3000",
                )
        for name in self.allowed_hosts:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name) and _address(name) is None:
                raise OptionError(
                    f"`--allowed-host` must be a name or an address, without scheme and port, found `{name}`",
                    "write it as board.local",
                )
        if self.api_key is None and not is_loopback(self.host):
            raise OptionError(
                f"`--host {self.host}` lets other machines ask, and no key is set",
                "add `--api-key-file FILE`, or listen on 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def read_key(path: Path) -> bytes:
    """Return the key in the first line of a file. Raises InputError."""
    try:
        lines = read_input(path, _MAX_KEY_BYTES, follow_links=True).splitlines()
    except UnreadableFile as error:
        raise InputError(f"`{path}` {error}", "write a key into it, like `openssl rand -hex 32` makes") from error
    key = lines[0].strip() if lines else b""
    if len(key) < LEAST_KEY_CHARACTERS or not all(0x21 <= byte < 0x7F for byte in key):
        raise InputError(
            f"`{path}`: the first line must be a key of {LEAST_KEY_CHARACTERS} or more visible ASCII characters",
            "make one: openssl rand -hex 32",
        )
    return key


class _Body:
    """The body of a request. A connection that closes before all of it is read takes the response from the client."""

    def __init__(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> None:
        self._receive = receive
        self.is_read = not any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)

    async def receive(self) -> Message:
        """Return the next message, and note the last one."""
        message = await self._receive()
        self.is_read = not message.get("more_body", False)
        return message

    async def drop(self) -> None:
        """Read the rest within limits and forget it. The client has the response already."""
        size, end_s = 0, time.monotonic() + DROPPED_S
        while not self.is_read and size < _DROPPED_BYTES and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                message = await asyncio.wait_for(self.receive(), left_s)
                size += len(message.get("body", b""))


class Guard:
    """ASGI middleware that checks every request. Pages and health need no key.

    body_of: returns the body of an error on a path.
    open_paths: paths that need no key in addition.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: SecurityOptions,
        body_of: Callable[[str, RequestError], dict[str, Any]],
        open_paths: Collection[str] = (),
    ) -> None:
        self._app, self._options, self._body_of = app, options, body_of
        self._open_paths = _OPEN_PATHS | set(open_paths)
        self._names = {"localhost", options.host.lower(), *(name.lower() for name in options.allowed_hosts)}
        self._takes_addresses = not is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        added, body = list(_PAGE_HEADERS), _Body(headers, receive)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *added]}
            elif not message.get("more_body") and not body.is_read:
                await send({**message, "more_body": True})
                await body.drop()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            _check_size(scope)
            host = self._checked_host(headers)
            origin = self._checked_origin(headers, host)
            if origin is not None:
                added += _cors_headers(origin)
                if scope["method"] == "OPTIONS":
                    await send_with_headers({"type": "http.response.start", "status": 204, "headers": []})
                    await send_with_headers({"type": "http.response.body", "body": b"", "more_body": False})
                    return
            if scope["path"] not in self._open_paths:
                self._check_key(headers)
        except RequestError as error:
            await send_error(send_with_headers, error, self._body_of(scope["path"], error))
            return
        await self._app(scope, body.receive, send_with_headers)

    def _checked_host(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return the Host header. A page of another site could have this machine's address under its own name."""
        given = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(given) == 1:
            name = _host_name(given[0]).lower()
            address = _address(name)
            if name in self._names or (address is not None and (address.is_loopback or self._takes_addresses)):
                return given[0].lower()
        raise RequestError(403, "the Host header names another server; see `--allowed-host`", None, "host_not_allowed")

    def _checked_origin(self, headers: list[tuple[bytes, bytes]], host: str) -> str | None:
        """Return the origin of a page of another site that may ask; None for this site and for other programs.

        A proxy with TLS turns https into http, so the page of this site may have either.
        """
        given = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        if not given or given in ([f"http://{host}"], [f"https://{host}"]):
            return None
        if len(given) == 1 and given[0] in self._options.cors_origins:
            return given[0]
        raise RequestError(403, "pages of other sites may not ask; see `--cors-origin`", None, "origin_not_allowed")

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        key = self._options.api_key
        if key is None:
            return
        given = [
            value[7:].strip() for name, value in headers if name == b"authorization" and value[:7].lower() == b"bearer "
        ]
        given += [value.strip() for name, value in headers if name == b"x-api-key"]
        if not any([hmac.compare_digest(sent, key) for sent in given]):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "the request has no valid API key", None, "invalid_api_key", challenge)


def _check_size(scope: Scope) -> None:
    """Refuse long headers. The parser bounds only those that arrive in several parts. Raises RequestError."""
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])  # with `: ` and the end of the line
    if size > MAX_HEADER_BYTES:
        raise RequestError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes", None, "headers_too_large")


def _cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"authorization, *"),  # clients have headers of their own
        (b"vary", b"origin"),
    ]


def _host_name(value: str) -> str:
    """Return the name in a Host header, without its port; empty for one of another form."""
    parts = _HOST.fullmatch(value)
    return "" if parts is None else parts[1] or parts[2]


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
