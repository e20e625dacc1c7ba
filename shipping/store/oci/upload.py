"""The upload of one blob to an OCI registry, in chunks. After a cut it goes on where the registry has got to.

docker-registry 2.8 gives an upload up when a chunk is cut. The upload then begins again.

Source: OCI distribution specification 1.1 (github.com/opencontainers/distribution-spec), Pushing a blob in chunks.
"""

from __future__ import annotations

import re
from urllib.parse import urljoin

from moec.manifests.errors import StoreFailed

from ..http_client import HttpClient
from ..http_connection import shown_place
from ..http_request import Again, HttpAnswer
from ..http_upload import Reply, refusal, send
from ..source_file import SourceFile

CHUNK_BYTES = 16 << 20
"""Bytes of one request."""
_MAX_CHUNK_BYTES = 1 << 30
_RESTARTS = 5
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_LOST = (404, 416)
_FINAL = (401, 403, 413, 507)


def begin_upload(client: HttpClient, uploads_url: str) -> tuple[str, int]:
    """Begin an upload. Return its URL, and the least bytes of a chunk that the registry takes. Raises StoreFailed."""
    reply = send(client, "POST", uploads_url, wanted=["Location", "OCI-Chunk-Min-Length"])
    location, least = reply.headers["Location"], reply.headers["OCI-Chunk-Min-Length"]
    if reply.status != 202 or not location:
        raise refusal("POST", uploads_url, reply)
    return urljoin(uploads_url, location), int(least) if re.fullmatch("[0-9]{1,10}", least) else 0


def closing_url(place: str, digest: str) -> str:
    """Return the URL whose PUT ends an upload."""
    return f"{place}{'&' if '?' in place else '?'}digest={digest}"


class BlobUpload:
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
        self.place, least_bytes = begin_upload(self._client, self._url)
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
