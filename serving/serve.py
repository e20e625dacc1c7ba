"""Serve one engine until a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moec.manifests.errors import ExecutionError, InputError, MoecError
from moec.runtime.engine.engine import Engine

from .api.service import Service, ServiceOptions
from .app import make_app
from .engine.scheduler import Scheduler, ServingOptions
from .http_server import HttpServer
from .saved_slots.saved_slots import SavedSlots
from .security import SecurityOptions

STALLED_S = 30.0
"""At the end the server waits so long for a pass to end, and for each slot to be saved."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of a server.

    saved_slots: folder for keys and values of conversations; None keeps them in memory alone.
    saved_slots_bytes: most bytes of that folder.
    """

    service: ServiceOptions
    security: SecurityOptions
    engine: ServingOptions = field(default_factory=ServingOptions)
    saved_slots: Path | None = None
    saved_slots_bytes: int = 0


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
    say: Callable[[str], None] = lambda text: None,
    give_up: Callable[[MoecError], None] = lambda error: None,
) -> None:
    """Serve until a signal. Closes the socket.

    on_ready: called when the server listens.
    report: called with faults, for the log.
    say: called with sentences for the log.
    give_up: called if the engine finishes nothing for STALLED_S at the end. It cannot be closed before its pass ends,
        so the process should end instead. If `give_up` returns, the pass is waited for.
    Raises InputError and OptionError for a folder of saved slots that cannot be used.
    """
    folder, limit_bytes = options.saved_slots, options.saved_slots_bytes
    with bound:
        saved_slots = None if folder is None else SavedSlots(engine, folder, limit_bytes, say)
        with Scheduler(engine, options.engine, report, saved_slots) as scheduler:
            service = Service(scheduler, options.service)

            def leave(ends_running: bool) -> None:
                service.grammars.stop()
                scheduler.drain(ends_running)

            try:
                app = make_app(service, options.security)
                server = HttpServer(app, options.service.deadline_s, on_ready, leave)
                asyncio.run(server.serve(sockets=[bound]))
            finally:
                service.close()
            if not scheduler.stop(STALLED_S):
                give_up(
                    ExecutionError(
                        f"the last pass has not ended for {STALLED_S:g} s, so the server ends without it",
                        "look for a disk or a network folder that does not answer",
                    )
                )
