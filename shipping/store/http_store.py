"""A store on an HTTP server: read by ranges, written by PUT, with folders and copies of WebDAV where it has them.

Source of MKCOL and COPY: RFC 4918, sections 9.3 and 9.8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from moec.manifests.errors import StoreFailed

from .access import Access, web_authorization
from .address import Address
from .http_client import HttpClient, HttpOptions, refusal, send
from .http_connection import shown_place
from .interface import Sent, SourceFile

_STORED = (200, 201, 204)
_NO_COPIES = (400, 404, 405, 501)
_READ_BACK_BYTES = 1 << 20
"""Size of a file that is read and compared before it is left alone, bytes."""


class UrlFiles:
    """Files of a store that a client reads by URL. Each kind of store has `_client`, and the URL of a path."""

    _client: HttpClient

    def _url(self, path: str) -> str:
        raise NotImplementedError

    def size_bytes(self, path: str) -> int | None:
        return self._client.size_bytes(self._url(path))

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        return self._client.read(self._url(path), start, end)

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        return self._client.read_small(self._url(path), limit_bytes)

    def close(self) -> None:
        self._client.close()


class HttpStore(UrlFiles):
    """Files of one model below a URL. A file is there when its PUT has ended; `commit` has nothing to do."""

    def __init__(self, address: Address, access: Access, options: HttpOptions | None = None) -> None:
        self.address = str(address)
        authorization = web_authorization(address, access)
        self._client = HttpClient(options, lambda url, challenge: authorization)
        self._known: dict[tuple[int, str], str] = {}
        self._made: set[str] = set()
        self._has_copies = True

    def note(self, path: str, size_bytes: int, sha256: str) -> None:
        self._known.setdefault((size_bytes, sha256), path)

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        """Add a file that never changes, as a copy on the server if an equal one is known.

        A server does not tell digests, so what is there counts by its size, and small files by their content.
        Raises StoreFailed, InputError.
        """
        is_there = not again and self._has(path, size_bytes, sha256)
        is_there = is_there or self._copy(path, size_bytes, sha256)
        if not is_there:
            self._make_folder(path)
            url = self._url(path)
            with SourceFile(source, size_bytes, sha256, sent) as content:
                headers = {"Content-Type": "application/octet-stream"}
                reply = send(self._client, "PUT", url, headers=headers, body=content.parts, size_bytes=size_bytes)
            if reply.status not in _STORED:
                raise refusal("PUT", url, reply)
            self._check_stored(path, size_bytes)
        self.note(path, size_bytes, sha256)
        return not is_there

    def commit(self, folder: str) -> None:
        """Do nothing. No channel names the bundle before all its files are there."""

    def replace(self, path: str, data: bytes) -> None:
        self._make_folder(path)
        url = self._url(path)
        headers = {"Content-Type": "application/json", "Cache-Control": "no-cache"}
        reply = send(self._client, "PUT", url, headers=headers, body=lambda: [data], size_bytes=len(data))
        if reply.status not in _STORED:
            raise refusal("PUT", url, reply)
        self._client.forget(url)

    def _url(self, path: str) -> str:
        return f"{self.address}/{quote(path)}"

    def _has(self, path: str, size_bytes: int, sha256: str) -> bool:
        """Return whether a file of this size is there, with this content if it is small. Raises StoreFailed."""
        if self.size_bytes(path) != size_bytes:
            return False
        data = self.read_small(path, size_bytes) if size_bytes <= _READ_BACK_BYTES else None
        return data is None or hashlib.sha256(data).hexdigest() == sha256

    def _copy(self, path: str, size_bytes: int, sha256: str) -> bool:
        """Let the server copy a known file with this content. Returns False if that is not possible."""
        known = self._known.get((size_bytes, sha256))
        if known is None or known == path or not self._has_copies:
            return False
        self._make_folder(path)
        reply = send(self._client, "COPY", self._url(known), headers={"Destination": self._url(path)})
        if reply.status in _NO_COPIES:
            self._has_copies = False
        if reply.status not in _STORED:
            return False
        self._check_stored(path, size_bytes)
        return True

    def _check_stored(self, path: str, size_bytes: int) -> None:
        """Raise StoreFailed if a server that reported success has another size."""
        self._client.forget(self._url(path))
        stored_bytes = self.size_bytes(path)
        if stored_bytes != size_bytes:
            stored = "no file" if stored_bytes is None else f"{stored_bytes} bytes"
            raise StoreFailed(
                f"`{shown_place(self._url(path))}`: the server took {size_bytes} bytes and has {stored}",
                "check the server",
            )

    def _make_folder(self, path: str) -> None:
        """Make the folder of a file, and those above it if they are missing.

        A server without WebDAV refuses, and then it needs no folders, or a PUT tells.
        """
        folder = path.rpartition("/")[0]
        if folder in self._made:
            return
        self._made.add(folder)
        url = f"{self.address}/{folder}/" if folder else f"{self.address}/"
        if self._collection(url) != 409:
            return
        root, below = self.address.split("://")[0] + "://" + self.address.split("/")[2], url.split("/")[3:-1]
        for depth in range(1, len(below) + 1):
            self._collection(f"{root}/{'/'.join(below[:depth])}/")

    def _collection(self, url: str) -> int:
        """Ask for a new folder. Returns the status of the answer."""
        return send(self._client, "MKCOL", url).status
