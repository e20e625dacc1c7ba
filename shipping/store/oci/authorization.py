"""Credentials of an OCI registry: user and password, or a token of another server that takes them.

Source: the Docker registry's specification (github.com/distribution/distribution), docs/spec/auth/token.md and, for
identity tokens, oauth.md.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlencode

from moec.manifests.errors import StoreFailed
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from ..access import IdentityToken, Login, RegistryLogin, keeps_secrets
from ..http_client import HttpClient, HttpOptions
from ..http_connection import origin_of, shown_place
from ..http_upload import refusal, send

_TOKEN_JSON = JsonLimits(1 << 20, containers=1 << 6, values=1 << 10, texts=1 << 10)
_LEAST_TOKEN_S = 60.0
_MOST_TOKEN_S = 86_400.0
_SPARE_TOKEN_S = 10.0
_MAX_CHALLENGE_CHARACTERS = 8192
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"\\]*)"')
_TOKEN = re.compile(r"[!-~]{1,65536}")
_CLIENT_ID = "moec"
_CHECK = "check the address and the registry"
_LOG_IN = "log in with `docker login`, or write the user into docker's config.json"


class RegistryAuthorization:
    """Gives the header `Authorization` for requests to a registry. Several threads may ask at the same time.

    A registry answers 401 with a challenge first. A token is kept until shortly before it expires.
    """

    def __init__(self, base_url: str, login: RegistryLogin | None, options: HttpOptions | None = None) -> None:
        """base_url: scheme and host. login: password or identity token; None: public repositories alone."""
        self._origin, self._login, self._options = origin_of(base_url), login, options
        self._header: str | None = None
        self._until = float("inf")
        self._lock = threading.Lock()

    def __call__(self, url: str, challenge: str | None) -> str | None:
        """Return the header for a URL: the one that a challenge asks for, or the last one. Raises StoreFailed."""
        if origin_of(url) != self._origin:
            return None
        with self._lock:
            if challenge is not None:
                self._header, self._until = self._answer(challenge[:_MAX_CHALLENGE_CHARACTERS])
            elif time.monotonic() > self._until:
                self._header = None
            return self._header

    def _answer(self, challenge: str) -> tuple[str | None, float]:
        """Return the header that a challenge asks for, and until when it holds. Raises StoreFailed."""
        kind, fields = challenge.partition(" ")[0].lower(), dict(_PARAMETER.findall(challenge))
        if kind == "bearer" and "realm" in fields:
            return self._fetch_token(fields)
        return self._basic() if kind == "basic" else None, float("inf")

    def _basic(self) -> str | None:
        return self._login.header() if isinstance(self._login, Login) else None

    def _fetch_token(self, fields: dict[str, str]) -> tuple[str, float]:
        """Return the header with a new token, and until when it holds. Raises StoreFailed."""
        realm = fields["realm"]
        try:
            origin = origin_of(realm)
        except ValueError as error:
            raise StoreFailed(f"the registry names no server of tokens: {error}", _CHECK) from error
        has_secrets = self._login is not None or self._origin.scheme == "https"
        if has_secrets and not keeps_secrets(f"{origin.scheme}://{origin.place}"):
            raise StoreFailed(f"the registry takes tokens of `{shown_place(realm)}`, which has no TLS", _CHECK)
        parameters = [(name, fields[name]) for name in ("service", "scope") if name in fields]
        header, started = self._basic(), time.monotonic()
        client = HttpClient(self._options, lambda url, challenge: header)
        try:
            if isinstance(self._login, IdentityToken):
                data = _bought_token(client, realm, self._login, parameters)
            else:
                url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(parameters)}"
                data = client.read_small(url, _TOKEN_JSON.size_bytes) or b""
        finally:
            client.close()
        token, lasting_s = _decode_token(data, realm)
        return f"Bearer {token}", started + lasting_s - _SPARE_TOKEN_S


def _bought_token(
    client: HttpClient, realm: str, identity: IdentityToken, parameters: Sequence[tuple[str, str]]
) -> bytes:
    """Return the answer of a server that gives tokens for an identity token. Raises StoreFailed."""
    grant = [("grant_type", "refresh_token"), ("client_id", _CLIENT_ID), ("refresh_token", identity.text)]
    form = urlencode([*grant, *parameters]).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = send(client, "POST", realm, headers=headers, body=lambda: [form], size_bytes=len(form))
    if reply.status != 200:
        raise refusal("POST", realm, reply)
    return reply.body


def _decode_token(data: bytes, realm: str) -> tuple[str, float]:
    """Return a token and the seconds for which it holds. Raises StoreFailed."""
    try:
        answer = load_strict_json(data, _TOKEN_JSON)
    except ValueError:
        answer = None
    values = answer if isinstance(answer, dict) else {}
    token, seconds = values.get("token") or values.get("access_token"), values.get("expires_in")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise StoreFailed(f"`{shown_place(realm)}` sends no token", _LOG_IN)
    lasting_s = seconds if isinstance(seconds, (int, float)) else 0
    return token, float(min(max(lasting_s, _LEAST_TOKEN_S), _MOST_TOKEN_S))
