"""The part of the Hugging Face hub's API that huggingface_hub uses to make, fill and read a repository, in memory.

Contents of large files lie on another host (`localhost` instead of 127.0.0.1), as they do there.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.shipping.servers import QuietHandler, on_loopback

_COMMIT = "0" * 40
"""The only commit of every branch."""


@dataclass
class FakeHub:
    """Repositories by name, with the files of each branch.

    token: what each request must have, those to the other host apart.
    refusal: status of every answer; 0: none.
    ignored: end of the names of files that a `.gitignore` leaves out of commits.
    received_bytes: bytes of large files that arrived.
    """

    token: str = "hub-token"
    refusal: int = 0
    ignored: str = "\0"
    url: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    is_private: dict[str, bool] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    received_bytes: int = 0
    leaked: list[str] = field(default_factory=list)


class HubHandler(QuietHandler, BaseHTTPRequestHandler):
    """Answers of a FakeHub."""

    hub: FakeHub

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: object, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, kind: str) -> None:
        self._answer(404, b"{}", {"X-Error-Code": kind})

    def route(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        is_content = path.startswith("/blobs/")
        if is_content and self.command != "PUT":
            if "Authorization" in self.headers:
                self.hub.leaked.append(self.headers["Authorization"])
        elif self.hub.refusal:
            self._answer(self.hub.refusal, b"{}")
            return
        elif not is_content and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._answer(401, b"{}")
            return
        for pattern, name in _ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                getattr(self, name)(body, *found.groups())
                return
        self._answer(405)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            self._json({"url": f"{self.hub.url}/{name}"}, 409)
            return
        self.hub.repositories[name] = {"main": {}}
        self.hub.is_private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        self._json({"url": f"{self.hub.url}/{name}"})

    def branch(self, body: bytes, name: str, branch: str) -> None:
        branches = self.hub.repositories[name]
        status = 409 if branch in branches else 201
        branches.setdefault(branch, dict(branches["main"]))
        self._json({}, status)

    def preupload(self, body: bytes, name: str, branch: str) -> None:
        told = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": file["path"].endswith(self.hub.ignored),
            }
            for file in json.loads(body)["files"]
        ]
        self._json({"files": told})

    def batch(self, body: bytes, name: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            told = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.blobs:
                told["actions"] = {"upload": {"href": f"{self.hub.url}/blobs/{asked['oid']}", "header": {}}}
            objects.append(told)
        self._json({"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, digest: str) -> None:
        if hashlib.sha256(body).hexdigest() != digest:
            self._answer(400)
            return
        self.hub.received_bytes += len(body)
        self.hub.blobs[digest] = body
        self._answer(200)

    def commit(self, body: bytes, name: str, branch: str) -> None:
        files = dict(self.hub.repositories[name][branch])
        paths = []
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            paths += [value["path"]] if "path" in value else []
        self.hub.repositories[name][branch] = files
        self.hub.commits.append(paths)
        self._json({"commitOid": _COMMIT, "commitUrl": f"{self.hub.url}/{name}/commit/{_COMMIT}", "hookOutput": ""})

    def tree(self, body: bytes, name: str, branch: str, folder: str) -> None:
        found = {
            path: data
            for path, data in self.hub.repositories[name]["main" if branch == _COMMIT else branch].items()
            if path.rpartition("/")[0] == folder.strip("/")
        }
        if not found:
            self._missing("EntryNotFound")
            return
        self._json([_listed(path, data) for path, data in found.items()])

    def revision(self, body: bytes, name: str, branch: str) -> None:
        if name not in self.hub.repositories:
            self._missing("RepoNotFound")
            return
        files = self.hub.repositories[name]["main"]
        self._json({"id": name, "sha": _COMMIT, "siblings": [{"rfilename": path} for path in files]})

    def resolve(self, body: bytes, name: str, branch: str, path: str) -> None:
        data = self.hub.repositories.get(name, {}).get("main" if branch == _COMMIT else branch, {}).get(path)
        if data is None:
            self._missing("EntryNotFound")
        elif path.endswith(".safetensors"):
            host = self.hub.url.replace("127.0.0.1", "localhost")
            self._answer(302, headers={"Location": f"{host}/blobs/{hashlib.sha256(data).hexdigest()}?signed=1"})
        else:
            self._range(data)

    def content(self, body: bytes, digest: str) -> None:
        self._range(self.hub.blobs[digest])

    def _range(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": _COMMIT}
        if asked is None:
            self._answer(200, data, tag)
        elif int(asked[1]) >= len(data):
            self._answer(416, headers={"Content-Range": f"bytes */{len(data)}"})
        else:
            part = data[int(asked[1]) : int(asked[2]) + 1]
            span = f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}"
            self._answer(206, part, {"Content-Range": span, **tag})


for _method in ("GET", "HEAD", "POST", "PUT"):
    setattr(HubHandler, f"do_{_method}", HubHandler.route)


def _listed(path: str, data: bytes) -> dict[str, object]:
    """Return a file as the hub lists it: a large one with its SHA-256, any other with git's digest."""
    told: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
    if path.endswith(".safetensors"):
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {**told, "oid": "0" * 40, "lfs": lfs}
    return {**told, "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}


_NAME, _REST = "([^/]+/[^/]+)", "([^/]+)"
_ROUTES = (
    ("POST /api/repos/create", "create"),
    (f"POST /api/models/{_NAME}/branch/{_REST}", "branch"),
    (f"POST /api/models/{_NAME}/preupload/{_REST}", "preupload"),
    (f"POST /api/models/{_NAME}/commit/{_REST}", "commit"),
    (f"GET /api/models/{_NAME}/revision/{_REST}", "revision"),
    (f"GET /api/models/{_NAME}/tree/{_REST}(/.*|)", "tree"),
    (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    (f"PUT /blobs/{_REST}", "upload"),
    (f"(?:GET|HEAD) /blobs/{_REST}", "content"),
    (f"(?:GET|HEAD) /{_NAME}/resolve/{_REST}/(.*)", "resolve"),
)


@contextlib.contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """Serve on loopback until the end of the block."""
    hub = FakeHub()
    with on_loopback(HubHandler, hub=hub) as host:
        hub.url = f"http://{host}"
        yield hub
