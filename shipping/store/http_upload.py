"""Requests that change something on an HTTP server. They are repeated as reads are, and their answers are short."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moec.manifests.errors import StoreFailed

from .http_client import HttpClient
from .http_connection import shown_place
from .http_request import Body

_MAX_REPLY_BYTES = 64 << 10
_REMEDIES = {
    401: "check the credentials",
    403: "check the credentials",
    405: "use a server that takes uploads (PUT)",
    413: "raise the server's limit of a request's size",
    501: "use a server that takes uploads (PUT)",
    507: "free space on the server",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of a server.

    headers: those that were asked for, by name; empty if not there.
    body: at most 64 KiB of it.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def send(
    client: HttpClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Body | None = None,
    size_bytes: int = 0,
    wanted: Collection[str] = (),
) -> Reply:
    """Send a request, and again after errors of the connection. Return the answer, of any status.

    body: content; None: it has none.
    size_bytes: size of the content.
    wanted: headers of the answer that are returned.
    Raises StoreFailed, and the errors of the body.
    """
    sized = {"Content-Length": str(size_bytes)} if method in ("PUT", "POST", "PATCH") else {}

    def attempt() -> Reply:
        with client.requests.answer(method, url, {**sized, **(headers or {})}, body) as answer:
            content = bytearray(_MAX_REPLY_BYTES)
            count = answer.read_into(memoryview(content)) if method != "HEAD" else 0
            return Reply(answer.status, {name: answer.header(name) for name in wanted}, bytes(content[:count]))

    return client.repeated(url, attempt)


def refusal(method: str, url: str, reply: Reply) -> StoreFailed:
    """Return the error for an answer that no retry changes."""
    remedy = _REMEDIES.get(reply.status, "check the address and the server")
    return StoreFailed(f"`{shown_place(url)}`: the server answered {reply.status} to {method}", remedy)
