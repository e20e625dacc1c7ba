"""A server of tokens for a registry, which checks who asks."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from moec.shipping.store.access import Login
from tests.shipping.servers import QuietHandler, on_loopback

ISSUER = "tokens"


@dataclass
class TokenServer:
    """Gives tokens that docker-registry accepts.

    login: user and password that it knows.
    identity: identity token that it knows.
    is_open: whether it gives tokens for reading to anyone.
    answer: sent in the place of a token; empty: a token.
    asked: fields that it got.
    certificate: of its signatures, PEM.
    """

    login: Login
    identity: str
    is_open: bool = False
    answer: bytes = b""
    url: str = ""
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, ISSUER)])
        now = datetime.now(timezone.utc)
        self._made = (
            x509.CertificateBuilder(name, name, self.key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .sign(self.key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """The certificate of its signatures, PEM."""
        return self._made.public_bytes(serialization.Encoding.PEM)

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
        chain = base64.b64encode(self._made.public_bytes(serialization.Encoding.DER)).decode()
        head = {"typ": "JWT", "alg": "ES256", "x5c": [chain]}
        text = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        r, s = decode_dss_signature(self.key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
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
