"""A client of one repository in an OCI registry: blobs by digest, manifests by tag.

A blob is uploaded in chunks. After a cut its upload goes on where the registry has got to. docker-registry 2.8 gives an
upload up when a chunk is cut. The upload then begins again.

Credentials are user and password, or a token of another server that takes them.

Sources: OCI distribution specification 1.1 (github.com/opencontainers/distribution-spec), spec.md. For tokens, the
Docker registry's specification (github.com/distribution/distribution), docs/spec/auth/token.md and oauth.md.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from urllib.parse import urlencode, urljoin

from moec.manifests.errors import StoreFailed
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

from .access import IdentityToken, Login, RegistryLogin, keeps_secrets
from .http_client import HttpClient, HttpOptions, Reply, refusal, send
from .http_connection import origin_of, shown_place
from .http_request import Again, HttpAnswer
from .interface import SourceFile

CHUNK_BYTES = 16 << 20
"""Bytes of one request."""
_MAX_CHUNK_BYTES = 1 << 30
_RESTARTS = 5
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_LOST = (404, 416)
_FINAL = (401, 403, 413, 507)
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MAX_MANIFEST_BYTES = 4 << 20
"""Size of a manifest, bytes: what every registry must take."""
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


class Registry:
    """Blobs and manifests of one repository. Several threads may read at the same time; one thread writes."""

    def __init__(
        self,
        base_url: str,
        repository: str,
        login: RegistryLogin | None = None,
        options: HttpOptions | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """base_url: scheme and host. chunk_bytes: bytes of a request of an upload."""
        patience = options or HttpOptions()
        accepting = replace(patience, headers={**patience.headers, "Accept": f"{MANIFEST_TYPE}, */*;q=0.5"})
        self._client = HttpClient(accepting, RegistryAuthorization(base_url, login, patience))
        self._root, self._chunk_bytes = f"{base_url}/v2/{repository}", chunk_bytes

    def blob_bytes(self, digest: str) -> int | None:
        """Return the size of a blob, or None. Raises StoreFailed."""
        return self._client.size_bytes(self._blob(digest))

    def read_blob(self, digest: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield a range of a blob. Raises StoreFailed."""
        return self._client.read(self._blob(digest), start, end)

    def read_small_blob(self, digest: str, limit_bytes: int) -> bytes | None:
        """Return a whole blob, or None. Raises StoreFailed."""
        return self._client.read_small(self._blob(digest), limit_bytes)

    def put_blob(self, digest: str, source: SourceFile) -> None:
        upload = _BlobUpload(self._client, self._uploads, source, self._chunk_bytes)
        upload.send()
        self._close_upload(upload.place, digest, b"", source.size_bytes)

    def put_small_blob(self, digest: str, data: bytes) -> None:
        """Add a blob by one request after the begin, if the registry does not have it. Raises StoreFailed."""
        if self.blob_bytes(digest) != len(data):
            place, _ = _begin_upload(self._client, self._uploads)
            self._close_upload(place, digest, data, len(data))

    def _close_upload(self, place: str, digest: str, rest: bytes, size_bytes: int) -> None:
        """End an upload with its last bytes. Raises StoreFailed if the blob is not there then."""
        url = f"{place}{'&' if '?' in place else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream"}
        reply = send(self._client, "PUT", url, headers=headers, body=lambda: [rest], size_bytes=len(rest))
        # A request that is repeated finds no upload if the first one has succeeded.
        if reply.status != 201 and self.blob_bytes(digest) != size_bytes:
            raise refusal("PUT", url, reply)

    def manifest(self, tag: str) -> bytes | None:
        """Return a manifest, or None. Raises StoreFailed."""
        return self._client.read_small(self._tagged(tag), MAX_MANIFEST_BYTES)

    def put_manifest(self, tag: str, data: bytes) -> None:
        """Write a manifest, which replaces the one with this tag. Raises StoreFailed."""
        headers = {"Content-Type": MANIFEST_TYPE}
        reply = send(self._client, "PUT", self._tagged(tag), headers=headers, body=lambda: [data], size_bytes=len(data))
        if reply.status != 201:
            raise refusal("PUT", self._tagged(tag), reply)

    def close(self) -> None:
        self._client.close()

    def _blob(self, digest: str) -> str:
        return f"{self._root}/blobs/{digest}"

    @property
    def _uploads(self) -> str:
        return f"{self._root}/blobs/uploads/"

    def _tagged(self, tag: str) -> str:
        return f"{self._root}/manifests/{tag}"


def _begin_upload(client: HttpClient, uploads_url: str) -> tuple[str, int]:
    """Begin an upload. Return its URL, and the least bytes of a chunk that the registry takes. Raises StoreFailed."""
    reply = send(client, "POST", uploads_url, wanted=["Location", "OCI-Chunk-Min-Length"])
    location, least = reply.headers["Location"], reply.headers["OCI-Chunk-Min-Length"]
    if reply.status != 202 or not location:
        raise refusal("POST", uploads_url, reply)
    return urljoin(uploads_url, location), int(least) if re.fullmatch("[0-9]{1,10}", least) else 0


class _BlobUpload:
    """An upload, from its begin to its last byte. The caller then closes it with the digest at `place`.

    place: URL of the upload; the registry may change it with every answer.
    """

    def __init__(
        self, client: HttpClient, uploads_url: str, source: SourceFile, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """uploads_url: where uploads of the repository begin."""
        self._client, self._url, self._source = client, uploads_url, source
        self._wanted_bytes = self._chunk_bytes = chunk_bytes
        self._done = self._restarts = 0
        self._is_unsure, self._states_range = False, True
        self.place = ""

    def send(self) -> None:
        """Begin the upload and send all bytes. Raises StoreFailed, InputError."""
        self._begin()
        while self._done < self._source.size_bytes:
            self._client.repeated(self._url, self._send_chunk)

    def _begin(self) -> None:
        self.place, least_bytes = _begin_upload(self._client, self._url)
        self._done = 0
        self._chunk_bytes = max(self._wanted_bytes, min(least_bytes, _MAX_CHUNK_BYTES))

    def _send_chunk(self) -> None:
        """Send the next bytes. Raises Again, StoreFailed, InputError."""
        if self._is_unsure:
            self._ask()
        self._is_unsure = True
        start, size = self._done, self._source.size_bytes
        end = min(start + self._chunk_bytes, size) if self._states_range else size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(end - start)}
        if (start, end) != (0, size):
            headers["Content-Range"] = f"{start}-{end - 1}"
        with self._client.requests.answer(
            "PATCH", self.place, headers, lambda: self._source.parts(start, end)
        ) as answer:
            if answer.status in (202, 204):
                self._move(answer)
                arrived = _RANGE.fullmatch(answer.header("Range"))
                self._done = end if arrived is None else min(int(arrived[1]) + 1, end)
                if self._done <= start:
                    raise Again("the registry took none of a part")
                self._is_unsure = False
            elif answer.status in _LOST:
                raise Again(f"the registry answered {answer.status} to a part")
            elif start or answer.status in _FINAL or not self._states_range or end == size:
                raise refusal("PATCH", self.place, Reply(answer.status))
            else:  # a registry that takes a blob in one request alone
                self._states_range = False

    def _ask(self) -> None:
        """Ask how many bytes have arrived. Begin again if the registry has lost the upload."""
        with self._client.requests.answer("GET", self.place) as answer:
            arrived = _RANGE.fullmatch(answer.header("Range"))
            if answer.status == 204 and arrived is not None and self._states_range:
                self._move(answer)
                count = int(arrived[1]) + 1
                self._done = count if 1 < count <= self._source.size_bytes else 0  # `0-0` also stands for none
                return
        self._restarts += 1
        if self._restarts > _RESTARTS:
            raise StoreFailed(f"`{shown_place(self._url)}`: the registry loses the upload again and again", "try again")
        self._begin()

    def _move(self, answer: HttpAnswer) -> None:
        location = answer.header("Location")
        self.place = urljoin(self.place, location) if location else self.place


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
