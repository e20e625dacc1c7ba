"""The uploads of a registry that keeps what has arrived of a cut chunk, as the OCI specification has it."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.shipping.servers import QuietHandler, on_loopback


@dataclass
class Uploads:
    """One upload after the other.

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
