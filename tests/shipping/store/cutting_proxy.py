"""A proxy of TCP connections that cuts an upload, or refuses a kind of request, before a real service."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

REFUSAL = b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class CuttingProxy:
    """Faults between a client and a service.

    cut_after: bytes of a request after which its connection is cut, for each request that is to be cut.
    refused: text in the head of a request that is answered with 405.
    """

    cut_after: list[int] = field(default_factory=list)
    refused: bytes = b""
    host: str = ""
    heads: list[bytes] = field(default_factory=list)


def _answers(service: socket.socket, client: socket.socket) -> None:
    """Hand on what a service sends."""
    with contextlib.suppress(OSError):
        while data := service.recv(1 << 16):
            client.sendall(data)
    _end(service, client)


def _requests(proxy: CuttingProxy, client: socket.socket, service: socket.socket) -> None:
    """Hand on what a client sends, until a fault happens."""
    seen = 0
    with contextlib.suppress(OSError):
        while data := client.recv(1 << 14):
            if b" HTTP/1.1\r\n" in data:
                proxy.heads.append(data)
                seen = 0
            if proxy.refused and proxy.refused in data:
                client.sendall(REFUSAL)
                break
            service.sendall(data)
            seen += len(data)
            if proxy.cut_after and seen > proxy.cut_after[0] >= seen - len(data):
                proxy.cut_after.pop(0)
                break
    _end(client, service)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _serve(proxy: CuttingProxy, client: socket.socket, host: str) -> None:
    name, _, port = host.partition(":")
    with client, socket.create_connection((name, int(port))) as service:
        answers = threading.Thread(target=_answers, args=(service, client), daemon=True)
        answers.start()
        _requests(proxy, client, service)
        answers.join()


def _accept(proxy: CuttingProxy, listener: socket.socket, host: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(proxy, client, host), daemon=True).start()


@contextlib.contextmanager
def cutting_proxy(host: str) -> Iterator[CuttingProxy]:
    """Serve in the place of a service until the end of the block. host: its host and port."""
    proxy = CuttingProxy()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.host = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=_accept, args=(proxy, listener, host), daemon=True)
        thread.start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
