"""A server for the chat page whose answers the test writes. The page and its headers are those of `moec serve`."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "serving" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
_PIECE = 2000
STATES = bytes([0, 1, 2, 3, 4, 5])
FIGURES = {
    "running": 1,
    "waiting": 2,
    "tokens_per_s": 7.5,
    "ttft_ms": 1500.0,
    "hit_rate": 0.75,
    "mib_per_token": 3.25,
    "waiting_share": 0.5,
    "memory_bytes": 1 << 30,
    "budget_bytes": 2 << 30,
}


@dataclass
class Script:
    """What the server answers, and what it was asked.

    answer: text of the next answer.
    is_held: whether an answer waits, after its first piece, until its client leaves.
    refusal: status and body instead of an answer, or None.
    comment: sent before the answer, if it is not empty.
    figures: figures of the feed that differ from FIGURES.
    asked: bodies of the requests.
    """

    answer: str = "an answer"
    is_held: bool = False
    refusal: tuple[int, dict[str, Any]] | None = None
    comment: str = ""
    has_template: bool = True
    mode: str = "streaming, LOSSY: dynamic-precision 0.4,0.8; io direct"
    figures: dict[str, Any] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


class PageServer(ThreadingHTTPServer):
    """The server of one script. closing: set at the end."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.closing = script, threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: PageServer

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer with facts, the feed, or a file of the page."""
        script = self.server.script
        facts = {"/props": props(script), "/v1/moec/experts": EXPERTS}.get(self.path)
        path = PAGE / (self.path.strip("/") or "index.html")
        if self.path == "/v1/moec/events":
            self._events()
        elif facts is not None:
            self._whole(200, json.dumps(facts).encode(), "application/json")
        elif path.suffix in _KINDS and path.is_file():
            self._whole(200, path.read_bytes(), _KINDS[path.suffix])
        else:
            self._whole(404, b"{}", "application/json")

    def do_POST(self) -> None:
        """Answer a request as the script says."""
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.asked.append(body)
        if script.refusal is not None:
            self._whole(script.refusal[0], json.dumps(script.refusal[1]).encode(), "application/json")
            return
        self._begin_stream()
        try:
            self._stream(script, is_chat="messages" in body)
        except OSError:
            script.ended.set()

    def _stream(self, script: Script, is_chat: bool) -> None:
        if script.comment:
            self.wfile.write(f": {script.comment}\n\n".encode())
        for at in range(0, len(script.answer), _PIECE):
            text = script.answer[at : at + _PIECE]
            self._send({"choices": [{"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}]})
        while script.is_held:
            self._send({"choices": []})
            script.ended.wait(0.02)
        timings = {"completion_tokens": 7, "prompt_tokens": 9, "cached_tokens": 4, "tokens_per_s": 12.5}
        self._send({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings})
        self.wfile.write(b"data: [DONE]\n\n")

    def _events(self) -> None:
        self._begin_stream()
        with contextlib.suppress(OSError):
            self._send(props(self.server.script))
            while not self.server.closing.wait(0.1):
                self._send({**FIGURES, **self.server.script.figures, "states": base64.b64encode(STATES).decode()})

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _send(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _whole(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", POLICY)
        if status == 429:
            self.send_header("Retry-After", "3")
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def page_server(script: Script) -> Iterator[str]:
    """Serve the page on loopback. Yields its address."""
    server = PageServer(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.closing.set()
        script.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def props(script: Script) -> dict[str, Any]:
    """Return the answer of `/props`: two layers of three experts."""
    sampling = {"temperature": 0.6, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}
    facts = {"model": "tiny", "mode": script.mode, "has_chat_template": script.has_template, "experts": [3, 3]}
    return {**facts, "sampling": sampling}


EXPERTS = {"layers": [3, 3], "experts": 6, "bits": [2, 3, 4, 2, 8, 0], "popularity": [0.5, 0.25, 0.25, 0.8, 0.1, 0]}
