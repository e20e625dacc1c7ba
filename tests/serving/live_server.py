"""A server on loopback in a thread of the tests, and a client of plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moec.runtime import Engine
from moec.serving.api.service import Service, ServiceOptions
from moec.serving.app import make_app
from moec.serving.engine.scheduler import Scheduler, ServingOptions
from moec.serving.security import SecurityOptions
from moec.serving.serve import HttpServer, bind

PATIENCE_S = 60


def in_threads(work: Sequence[Any]) -> None:
    """Run callables at once. The first failure is raised."""
    failures: list[BaseException] = []

    def run(each: Any) -> None:
        try:
            each()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class Reply:
    """A response: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def events(self) -> list[Any]:
        """The values of the server-sent events, without the end mark."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(frozen=True)
class LiveServer:
    """A server that listens."""

    port: int
    scheduler: Scheduler
    service: Service
    server: HttpServer

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """Send one request and return the response."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, data, headers or {})
            found = connection.getresponse()
            return Reply(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Send a body."""
        return self.ask("POST", path, body, headers)

    def wait_until_idle(self) -> None:
        """Wait until no connection is open for an answer, and no request runs or waits."""
        for _ in range(PATIENCE_S * 100):
            is_answering = self.server.server_state.tasks or self.server.server_state.connections
            if not (is_answering or self.scheduler.running or self.scheduler.waiting):
                return
            threading.Event().wait(0.01)
        raise AssertionError("requests go on")


@contextlib.contextmanager
def live_server(
    engine: Engine,
    options: ServingOptions | None = None,
    service_options: ServiceOptions | None = None,
    security: SecurityOptions | None = None,
) -> Iterator[LiveServer]:
    """Serve an engine in a thread until the block ends."""
    ready = threading.Event()
    chosen = service_options or ServiceOptions("tiny", deadline_s=PATIENCE_S)
    with bind("127.0.0.1", 0) as bound, Scheduler(engine, options) as scheduler:
        service = Service(scheduler, chosen)
        app = make_app(service, security or SecurityOptions("127.0.0.1"))
        server = HttpServer(app, 1.0, ready.set, scheduler.drain)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield LiveServer(bound.getsockname()[1], scheduler, service, server)
        finally:
            server.leave(at_once=True)
            thread.join(PATIENCE_S)
            service.close()
            assert not thread.is_alive()
