"""A server of files on loopback, with ranges, counts of what it sent, and faults."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 64 << 10
SEND_BUFFER_BYTES = 64 << 10
"""Bytes that the kernel holds for a client; they count as sent before they are received."""


@dataclass
class Fault:
    """What is wrong with some answers.

    kind: "cut" (the body ends early), "drop" (no answer), "whole" (200 and all bytes), "flip" (another byte), "etag"
        (another ETag every time), "gzip" (says so), "redirect" (to `to`), "status" (`status`), "endless" (a chunked
        body without end), "slow" (a byte at a time), "silent" (a head without a body), "shifted" (another range),
        "interim" (answers with 100 without end).
    name: last part of the paths that it concerns; empty: all.
    after_bytes: correct bytes before a cut, a flip or slowness.
    times: how often it happens.
    """

    kind: str
    name: str = ""
    after_bytes: int = 0
    times: int = 10**9
    to: str = ""
    status: int = 500
    retry_after: str = ""


@dataclass(frozen=True)
class Request:
    """A request as it came. span: first byte and end of its range, or None."""

    method: str
    path: str
    span: tuple[int, int] | None
    headers: dict[str, str]


@dataclass
class FileServer:
    """The files below a folder. `url` is its address.

    sent_bytes: bytes of bodies that were handed to the kernel.
    before_answer: called with each request.
    on_sent: called with sent_bytes when it has grown.
    """

    folder: Path
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sent_bytes: int = 0
    serves_ranges: bool = True
    before_answer: Callable[[Request], None] = lambda request: None
    on_sent: Callable[[int], None] = lambda sent_bytes: None
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_for(self, path: str) -> Fault | None:
        """Return the first fault of a path that still happens, and count it."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and path.endswith(fault.name):
                    fault.times -= 1
                    return fault
        return None

    def count(self, size_bytes: int) -> None:
        """Count bytes of a body."""
        with self.lock:
            self.sent_bytes += size_bytes
            sent_bytes = self.sent_bytes
        self.on_sent(sent_bytes)


class QuietHandler(BaseHTTPRequestHandler):
    """Answers of a server that logs nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


class Handler(QuietHandler, BaseHTTPRequestHandler):
    """Answers of a FileServer."""

    files: FileServer
    fault: Fault | None = None

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        span = (int(asked[1]), int(asked[2]) + 1) if asked else None
        request = Request(self.command, path, span, dict(self.headers.items()))
        with self.files.lock:
            self.files.requests.append(request)
        self.files.before_answer(request)
        self.fault = self.files.fault_for(path)
        file = self.files.folder / path.lstrip("/")
        if self._is_answered_by_fault():
            return
        if not file.is_file() or ".." in path:
            self._head(404, 0)
            return
        self._send(file, file.stat().st_size, span)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _kind(self) -> str:
        return self.fault.kind if self.fault else ""

    def _is_answered_by_fault(self) -> bool:
        """Answer with a fault that needs no file."""
        fault = self.fault
        if fault is None or fault.kind not in ("drop", "status", "redirect", "interim"):
            return False
        if fault.kind == "drop":
            self.close_connection = True
        elif fault.kind == "interim":
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        elif fault.kind == "redirect":
            self._head(302, 0, {"Location": fault.to})
        else:
            extra = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            self._head(fault.status, 0, extra)
        return True

    def _head(self, status: int, size_bytes: int | None, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (extra or {}).items():
            self.send_header(name, value)
        if size_bytes is not None:
            self.send_header("Content-Length", str(size_bytes))
        self.end_headers()

    def _send(self, file: Path, size_bytes: int, span: tuple[int, int] | None) -> None:
        kind = self._kind()
        known = file.stat()
        extra = {"ETag": f'"{known.st_mtime_ns:x}-{size_bytes:x}"', "Accept-Ranges": "bytes"}
        if kind == "etag":
            extra["ETag"] = f'"{time.monotonic_ns():x}"'
        if kind == "gzip":
            extra["Content-Encoding"] = "gzip"
        if span is None or not self.files.serves_ranges or kind == "whole":
            status, start, end = 200, 0, size_bytes
        elif span[0] >= size_bytes:
            self._head(416, 0, {"Content-Range": f"bytes */{size_bytes}"})
            return
        else:
            status, start, end = 206, span[0], min(span[1], size_bytes)
            if kind == "shifted":
                start, end = start + 1, end + 1
            extra["Content-Range"] = f"bytes {start}-{end - 1}/{size_bytes}"
        if kind == "endless":
            extra["Transfer-Encoding"] = "chunked"
        self._head(status, None if kind == "endless" else end - start, extra)
        if self.command == "GET":
            with contextlib.suppress(OSError):
                self._body(file, start, end)

    def _body(self, file: Path, start: int, end: int) -> None:
        fault, done = self.fault, 0
        kind = self._kind()
        with file.open("rb") as opened:
            opened.seek(start)
            while done < end - start:
                piece = bytearray(opened.read(min(PIECE_BYTES, end - start - done)))
                if fault is not None and done + len(piece) > fault.after_bytes:
                    at = max(0, fault.after_bytes - done)
                    if kind in ("cut", "silent"):
                        self._write(piece[:at])
                        self._stall() if kind == "silent" else None
                        self.close_connection = True
                        return
                    if kind == "slow":
                        self._write(piece[:at])
                        self._drip(piece[at:])
                    elif kind == "flip" and at < len(piece) and done <= fault.after_bytes:
                        piece[at] ^= 1
                done += len(piece)
                self._write(piece, is_chunk=kind == "endless")
            while kind == "endless":
                self._write(bytearray(PIECE_BYTES), is_chunk=True)

    def _drip(self, data: bytearray) -> None:
        for at in range(len(data)):
            self._write(data[at : at + 1])
            time.sleep(0.02)

    def _stall(self) -> None:
        """Wait until the client leaves."""
        self.request.settimeout(60)
        self.request.recv(1)

    def _write(self, data: bytearray, is_chunk: bool = False) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), bytes(data)) if is_chunk else bytes(data))
        self.files.count(len(data))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that leave."""


@contextlib.contextmanager
def on_loopback(handler: type[QuietHandler], tls: ssl.SSLContext | None = None, **served: Any) -> Iterator[str]:
    """Serve until the end of the block. Yields host and port.

    tls: settings of a server over TLS; None: plain HTTP.
    served: attributes of the handler.
    """
    server = _Server(("127.0.0.1", 0), type("Bound", (handler,), served))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serving(
    files: FileServer, handler: type[Handler] = Handler, tls: ssl.SSLContext | None = None
) -> Iterator[FileServer]:
    """Serve files on loopback until the end of the block. tls: as in `on_loopback`."""
    with on_loopback(handler, tls, files=files) as host:
        files.url = f"{'http' if tls is None else 'https'}://{host}"
        yield files
