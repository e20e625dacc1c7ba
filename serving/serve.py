"""Serve one engine until a signal, by uvicorn with time limits for headers. A signal ends answers in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from moec.manifests.errors import ExecutionError, InputError, MoecError
from moec.runtime.engine.engine import Engine

from .api.service import Service, ServiceOptions
from .app import make_app
from .engine.saved_slots import SavedSlots
from .engine.scheduler import Scheduler, ServingOptions
from .security import MAX_HEADER_BYTES, SecurityOptions

STALLED_S = 30.0
"""At the end the server waits so long for a pass to end, and for each slot to be saved."""
HEADER_S = 10.0
UNREAD_S = 60.0
"""A client that reads nothing of its response for so long is cut off."""
_UNREAD_BYTES = 16 << 10
"""Bytes of a response that wait in memory for the client. The sender of the response waits with the rest."""
_KEEP_ALIVE_S = 15
_MOST_CONNECTIONS = 256
LEAVING_S = 5.0
"""Time after the deadline of answers in which the server waits for connections to close."""


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


class _TimedProtocol(H11Protocol):
    """A connection that is closed if the headers of a request take too long, or if the client reads nothing."""

    _header_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _has_moved = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNREAD_BYTES)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as the response is made."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        self._has_moved = True
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_unread()

    def _watch_unread(self) -> None:
        if self._unread_timer is None and (unread := self.transport.get_write_buffer_size()):
            self._has_moved = False
            self._unread_timer = self.loop.call_later(UNREAD_S, self._end_unread, unread)

    def _end_unread(self, before: int) -> None:
        """Close the connection if the client has neither read nor sent anything."""
        self._unread_timer = None
        if not self._has_moved and self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_unread()

    def data_received(self, data: bytes) -> None:
        self._has_moved = True
        super().data_received(data)
        if self._is_answering:
            self._stop_timer()
        elif self._header_timer is None:
            self._start_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_S, self._end_slow)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_slow(self) -> None:
        self._header_timer = None
        if not self._is_answering:
            self.transport.abort()


class HttpServer(uvicorn.Server):
    """Serves an application until a signal.

    SIGTERM: no more requests are taken, and running answers end. SIGINT, or a second signal: answers end at once.
    drain_s: most seconds that running answers have after SIGTERM.
    on_ready: called when the server listens.
    on_leave: called at a signal, with whether running answers must end at once.
    """

    def __init__(
        self, app: ASGIApp, drain_s: float, on_ready: Callable[[], None], on_leave: Callable[[bool], None]
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_TimedProtocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(drain_s + LEAVING_S),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line for each malformed request
        self._on_ready, self._on_leave = on_ready, on_leave

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and tell it."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the loop. Only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, number == signal.SIGINT)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def leave(self, at_once: bool) -> None:
        """End the server. A second call ends answers at once."""
        if self.should_exit and at_once:
            self.force_exit = True
        self._on_leave(at_once or self.should_exit)
        self.should_exit = True
