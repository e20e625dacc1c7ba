"""Servers for tests of registries: uploads as the OCI specification has them, tokens, and a proxy that cuts uploads."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from moec.shipping.store.access import Login
from tests.shipping.certificates import make_certificate
from tests.shipping.servers import QuietHandler, on_loopback

REFUSAL = b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
ISSUER = "tokens"


@dataclass
class CuttingProxy:
    """Faults between a client and a service.

    cut_after: bytes of a request after which its connection is cut, for each request that is to be cut.
    refused: text in the head of a request that is answered with 405.
    """

    cut_after: list[int] = field(default_factory=list)
    refused: bytes = b""
    host: str = ""


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


@dataclass
class Uploads:
    """One upload after the other. What has arrived of a cut chunk is kept.

    cut_at: bytes of an upload at which the connection is cut, each once.
    least_chunk_bytes: what a chunk, the last one apart, must have.
    begun: number of uploads.
    spans: ranges of the chunks as they came.
    """

    url: str = ""
    cut_at: list[int] = field(default_factory=list)
    least_chunk_bytes: int = 0
    begun: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    blobs: dict[str, bytes] = field(default_factory=dict)


class UploadHandler(QuietHandler, BaseHTTPRequestHandler):
    """Answers of Uploads."""

    uploads: Uploads

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_HEAD(self) -> None:
        data = self.uploads.blobs.get(self.path.rpartition("/")[2])
        self._answer(404) if data is None else self._answer(200, Content_Length=str(len(data)))

    def do_POST(self) -> None:
        self.uploads.begun += 1
        self.uploads.data.clear()
        least = {"OCI_Chunk_Min_Length": str(self.uploads.least_chunk_bytes)} if self.uploads.least_chunk_bytes else {}
        self._answer(202, Location=f"/upload/{self.uploads.begun}", **least)

    def do_GET(self) -> None:
        self._answer(204, Range=f"0-{max(0, len(self.uploads.data) - 1)}", Location=self.path)

    def do_PATCH(self) -> None:
        uploads, size = self.uploads, int(self.headers["Content-Length"])
        asked = re.fullmatch(r"(\d+)-(\d+)", self.headers.get("Content-Range", f"0-{size - 1}"))
        start = len(uploads.data)
        if asked is None or (int(asked[1]), int(asked[2])) != (start, start + size - 1):
            self._answer(416)
            return
        uploads.spans.append((start, start + size))
        if uploads.cut_at and uploads.cut_at[0] < start + size:
            uploads.data += self.rfile.read(uploads.cut_at.pop(0) - start)
            self.close_connection = True
            return
        uploads.data += self.rfile.read(size)
        self._answer(202, Range=f"0-{len(uploads.data) - 1}", Location=self.path)

    def do_PUT(self) -> None:
        (digest,) = parse_qs(urlsplit(self.path).query)["digest"]
        if digest != f"sha256:{hashlib.sha256(self.uploads.data).hexdigest()}":
            self._answer(400)
            return
        self.uploads.blobs[digest] = bytes(self.uploads.data)
        self._answer(201)


@contextlib.contextmanager
def serving_uploads() -> Iterator[Uploads]:
    """Serve on loopback until the end of the block."""
    uploads = Uploads()
    with on_loopback(UploadHandler, uploads=uploads) as host:
        uploads.url = f"http://{host}"
        yield uploads


@dataclass
class TokenServer:
    """Gives tokens that docker-registry accepts.

    login: user and password that it knows.
    identity: identity token that it knows.
    is_open: whether it gives tokens for reading to anyone.
    answer: sent in the place of a token; empty: a token.
    asked: fields that it got.
    made: key and certificate of its signatures.
    """

    login: Login
    identity: str
    is_open: bool = False
    answer: bytes = b""
    url: str = ""
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    made: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] = field(default_factory=lambda: make_certificate(ISSUER))

    @property
    def certificate(self) -> bytes:
        """The certificate of its signatures, PEM."""
        return self.made[1].public_bytes(serialization.Encoding.PEM)

    def token(self, asked: dict[str, list[str]]) -> str:
        """Return a JSON web token, by ES256. Source: RFC 7515, RFC 7518."""
        kind, name, actions = asked["scope"][0].split(":")
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": asked["service"][0],
            "sub": self.login.user,
            "exp": now + 300,
            "nbf": now - 60,
            "iat": now,
            "jti": str(len(self.asked)),
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }
        chain = base64.b64encode(self.made[1].public_bytes(serialization.Encoding.DER)).decode()
        head = {"typ": "JWT", "alg": "ES256", "x5c": [chain]}
        text = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        r, s = decode_dss_signature(self.made[0].sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{text}.{_base64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


class TokenHandler(QuietHandler, BaseHTTPRequestHandler):
    """Answers of a TokenServer: GET for user and password, POST for identity tokens."""

    tokens: TokenServer

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        given = self.headers.get("Authorization")
        is_open = given is None and self.tokens.is_open and asked["scope"][0].endswith(":pull")
        self._grant(asked, "token", is_open or given == self.tokens.login.header())

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        is_form = self.headers["Content-Type"] == "application/x-www-form-urlencoded"
        is_complete = asked.get("grant_type") == ["refresh_token"] and "client_id" in asked
        is_known = asked.get("refresh_token") == [self.tokens.identity]
        self._grant(asked, "access_token", is_form and is_complete and is_known)

    def _grant(self, asked: dict[str, list[str]], name: str, is_allowed: bool) -> None:
        self.tokens.asked.append(asked)
        if not is_allowed:
            self.send_error(401)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.tokens.answer or json.dumps({name: self.tokens.token(asked), "expires_in": 300}).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@contextlib.contextmanager
def serving_tokens(login: Login, identity: str) -> Iterator[TokenServer]:
    """Serve on loopback until the end of the block."""
    tokens = TokenServer(login, identity)
    with on_loopback(TokenHandler, tokens=tokens, protocol_version="HTTP/1.0") as host:
        tokens.url = f"http://{host}/token"
        yield tokens
