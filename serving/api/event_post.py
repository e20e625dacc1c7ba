"""Events of requests on their way from the engine's thread to the tasks that answer.

All events of a pass cross together. A crossing wakes the loop by a system call, which gives up the interpreter lock.
With one crossing per event, the engine would wait for the loop after each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from ..engine.request import Event


class Inbox:
    """Events of the requests of one answer.

    receivers: take the events of each request, in the engine's thread.
    """

    def __init__(self, count: int, put: Callable[[Inbox, int, Event], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._events = deque[tuple[int, Event]]()
        self._waiter: asyncio.Future[None] | None = None
        self.receivers = [self._receiver(index, put) for index in range(count)]

    def _receiver(self, index: int, put: Callable[[Inbox, int, Event], None]) -> Callable[[Event], None]:
        return lambda event: put(self, index, event)

    def add(self, index: int, event: Event) -> None:
        """Add an event. Called in the loop."""
        self._events.append((index, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Return all events, after waiting for one; an empty list after the time-out."""
        if not self._events:
            self._waiter = self.loop.create_future()
            timer = self.loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        events = list(self._events)
        self._events.clear()
        return events


class EventPost:
    """Hands events to inboxes, those of a pass together."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[Inbox, int, Event]]()

    def inbox(self, count: int) -> Inbox:
        """Return an inbox for the events of `count` requests."""
        return Inbox(count, self._put)

    def _put(self, inbox: Inbox, index: int, event: Event) -> None:
        self._waiting.append((inbox, index, event))

    def send(self) -> None:
        """Hand over all events that wait. Any thread may call this."""
        waiting = self._waiting
        if waiting:
            with contextlib.suppress(RuntimeError, IndexError):  # the loop has ended; another thread has sent them
                waiting[0][0].loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                inbox, index, event = self._waiting.popleft()
                inbox.add(index, event)
