"""A file server that also takes uploads: PUT, and the MKCOL and COPY of WebDAV, with faults."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.shipping.servers import Fault, FileServer, Handler, Request

SHORT_BYTES = 64 * 1024
"""Longest body that is read before a refusal."""


@dataclass
class DavServer(FileServer):
    """The files below a folder, open for writing.

    received_bytes: bytes of bodies that arrived.
    authorization: header that each request must have; empty: none.
    has_collections: whether it has MKCOL, and wants folders before files.
    has_copies: whether it has COPY.
    keeps_bytes: most bytes of an upload that it keeps.
    upload_faults: what is wrong with some answers to PUT.
    metadata: metadata of Google Cloud Storage that came with a file, by path.
    """

    received_bytes: int = 0
    authorization: str = ""
    has_collections: bool = True
    has_copies: bool = True
    keeps_bytes: int = 1 << 60
    upload_faults: list[Fault] = field(default_factory=list)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)


class DavHandler(Handler, BaseHTTPRequestHandler):
    """Answers of a DavServer."""

    files: DavServer

    def parse_request(self) -> bool:
        """Read a request. Refuse it if it has other credentials than expected."""
        if not super().parse_request():
            return False
        if self.files.authorization and self.headers.get("Authorization") != self.files.authorization:
            self.close_connection = True
            self._take_short_body()
            self._head(401, 0, {"WWW-Authenticate": 'Basic realm="files"'})
            return False
        return True

    def do_PUT(self) -> None:
        path, size = self._begun(), int(self.headers["Content-Length"])
        target = self.files.folder / path
        self.fault = self._upload_fault(path)
        if self.fault is not None and self.fault.kind == "status":
            self._take_short_body()
        if self._is_answered_by_fault():  # without a look at a long body
            self.close_connection = True
            return
        if self.fault is not None and self.fault.kind == "cut":
            self.rfile.read(self.fault.after_bytes)
            self.close_connection = True
            return
        data = self.rfile.read(size)
        with self.files.lock:
            self.files.received_bytes += len(data)
        if not target.parent.is_dir():
            if self.files.has_collections:
                self._head(409, 0)
                return
            target.parent.mkdir(parents=True)
        if len(data) < size:  # the client left
            self.close_connection = True
            return
        growing = target.with_name(f".{target.name}.{id(self)}")
        growing.write_bytes(data[: self.files.keeps_bytes])
        told = {name: value for name, value in self.headers.items() if name.lower().startswith("x-goog-meta-")}
        self.files.metadata[path] = told
        os.replace(growing, target)
        self._head(201, 0, {"ETag": '"of-an-upload"'})

    def do_MKCOL(self) -> None:
        path = self._begun()
        target = self.files.folder / path
        if not self.files.has_collections or target.exists():
            self._head(405, 0)
        elif not target.parent.is_dir():
            self._head(409, 0)
        else:
            target.mkdir()
            self._head(201, 0)

    def do_COPY(self) -> None:
        path = self._begun()
        if not self.files.has_copies:
            self._head(501, 0)
            return
        target = self.files.folder / unquote(urlsplit(self.headers["Destination"]).path).lstrip("/")
        shutil.copyfile(self.files.folder / path, target)
        self._head(201, 0)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer, with a date that services of object storage state."""
        super().send_response(code, message)
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 12:00:00 GMT")
        if self.command in ("GET", "HEAD"):
            for name, value in self.files.metadata.get(unquote(urlsplit(self.path).path).strip("/"), {}).items():
                self.send_header(name, value)

    def _take_short_body(self) -> None:
        """Read a short body before an answer. A connection that is closed with bytes unread may lose the answer."""
        size = int(self.headers.get("Content-Length", 0))
        if size <= SHORT_BYTES:
            self.rfile.read(size)

    def _upload_fault(self, path: str) -> Fault | None:
        for fault in self.files.upload_faults:
            if fault.times > 0 and path.endswith(fault.name):
                fault.times -= 1
                return fault
        return None

    def _begun(self) -> str:
        """Count the request, and return its path below the folder."""
        path = unquote(urlsplit(self.path).path)
        request = Request(self.command, path, None, dict(self.headers.items()))
        with self.files.lock:
            self.files.requests.append(request)
        return path.strip("/")
