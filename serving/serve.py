"""Serve one engine until a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from moec.manifests.errors import InputError
from moec.runtime.engine.engine import Engine

from .api.service import Service, ServiceOptions
from .app import make_app
from .engine.scheduler import Scheduler, ServingOptions
from .http_server import HttpOptions, HttpServer
from .security import SecurityOptions


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of a server."""

    service: ServiceOptions
    security: SecurityOptions
    engine: ServingOptions = field(default_factory=ServingOptions)
    http: HttpOptions = field(default_factory=HttpOptions)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Port 0 takes a free one. Raises InputError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host[:60]} port {port}: {reason}", "choose another `--port`") from error
    return bound


def serve(
    engine: Engine,
    bound: socket.socket,
    options: ServeOptions,
    on_ready: Callable[[], None],
    report: Callable[[BaseException], None],
) -> None:
    """Serve until a signal. Closes the socket.

    on_ready: called when the server listens.
    report: called with faults, for the log.
    """
    with bound, Scheduler(engine, options.engine, report) as scheduler:
        service = Service(scheduler, options.service)
        try:
            server = HttpServer(make_app(service, options.security), options.http, on_ready, scheduler.drain)
            asyncio.run(server.serve(sockets=[bound]))
        finally:
            service.close()
